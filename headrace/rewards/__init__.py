"""The reward seam: what a response is worth, from functions, services and reward models, with weights.

    scorer = build_scorer(config)     # every source of the configuration
    await scorer.start()              # loads them; RewardError names what cannot be
    reward, parts = await scorer.score(data_source, solution, ground_truth, extra_info)

What the sources have in common is in `scorer`, one kind each in `pool` (functions, the built-in ones too, in
processes of their own) and `remote` (HTTP services and reward models).
"""

from headrace.rewards.function import RewardError, RewardFunction, load_reward, parse_score
from headrace.rewards.scorer import Scorer, build_scorer
from headrace.rewards.source import Judged, Source

__all__ = [
    "Judged",
    "RewardError",
    "RewardFunction",
    "Scorer",
    "Source",
    "build_scorer",
    "load_reward",
    "parse_score",
]
