"""The reward of a response: a weighted sum over functions, services and reward models.

    scorer = build_scorer(config)     # every configured source
    await scorer.start()              # loads them; RewardError names what cannot be loaded
    reward, parts = await scorer.score(data_source, solution, ground_truth, extra_info)

`scorer` combines the sources. `pool` runs functions, built-in ones included, in their own processes. `remote`
calls HTTP services and reward models.
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
