"""The keys of `sync.jsonl` and `eval.jsonl`: docs/metrics.md and the tests of real rows go by them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Keys:
    """A key of `sync.jsonl` or `eval.jsonl`; every row has all of them."""

    name: str
    meaning: str


SYNC_ROW: tuple[Keys, ...] = (
    Keys("version", "the policy version that the round committed"),
    Keys("round", "number of the round; abandoned rounds are numbered too"),
    Keys("members", "rollouters that took part"),
    Keys("attempts", "transfers started; more than 1 after a failure"),
    Keys("pause_s", "seconds until all rollouters had paused"),
    Keys("transfer_s", "seconds of the transfer"),
    Keys("commit_s", "seconds of the commit in Redis"),
    Keys("total_s", "seconds of the round"),
    Keys("interval_s", "seconds since the previous commit, or since the trainer's start"),
    Keys("bytes", "of weights sent to each rollouter"),
    Keys(
        "rollouters",
        "by incarnation: `active_s` and `window_s`, its last reported sums since its start when the trainer "
        "learned of the commit. `rollouter/idle_ratio` is 1 − (growth of the first since the previous row ÷ "
        "growth of the second), over all",
    ),
    Keys(
        "logprob_max_abs_diff",
        "canary: largest log-prob difference between engine and trainer that a member reported; null without "
        "a report",
    ),
)
"""Keys of a row of `sync.jsonl`."""

EVAL_ROW: tuple[Keys, ...] = (
    Keys("version", "the policy version that was validated"),
    Keys("data_source", "of the held-out prompts"),
    Keys("reward", "mean@k: over the prompts with a result; null without any"),
    Keys("n", "prompts with a result"),
    Keys("unfinished", "prompts without a result, or with fewer than k responses"),
    Keys("k", "responses per prompt, `val.n`"),
    Keys("best", "best@k: mean over the prompts of the best response; null with k = 1"),
    Keys(
        "majority",
        "maj@k: mean over the prompts of the answer that most responses gave; null with k = 1",
    ),
)
"""Keys of a row of `eval.jsonl`."""


def score_names(k: int) -> dict[str, str]:
    """Key of a row of `eval.jsonl` -> verl's name of that score with `k` responses. Trackers show it as
    `val/SOURCE/NAME`, Prometheus as a value of the label `statistic`."""
    return {"reward": f"reward/mean@{k}", "best": f"reward/best@{k}", "majority": f"reward/maj@{k}"}
