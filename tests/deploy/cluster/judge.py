"""What the story judges by: readings of the run's ledger. Pure functions, so that tests can try them.

The first rule is that every step is looked at on a run that is on. A run that is over agrees with everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal
from typing import Any

PRODUCTIVE_S = 300.0
"""How long the run has to have work for, from its first updates on; for a good part of the story it stands
still."""


class Broken(AssertionError):
    """A promise of the chart's that the cluster did not keep, or a story that proves nothing."""


@dataclass(frozen=True)
class Reading:
    """`/stats` of the queue service, as far as it matters here. Counts are samples."""

    trained: int
    issued: int
    total: int
    version: int
    term: int
    lineage: int
    max_required: int
    window: int
    end_of_data: bool
    completed: bool
    members: int
    missing: int
    """Issued, and in none of the states."""

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> Reading:
        same = ("total", "version", "term", "lineage", "max_required", "window", "end_of_data", "completed")
        issued = stats["issued_total"]
        return cls(
            trained=stats["counts"]["trained"],
            issued=issued,
            members=len(stats["members"]),
            missing=issued - sum(stats["counts"].values()),
            **{name: stats[name] for name in same},
        )

    @property
    def on(self) -> bool:
        """Whether there are prompts that nobody has begun: whoever joins now still gets some."""
        return not self.end_of_data and not self.completed

    def __str__(self) -> str:
        state = "completed" if self.completed else "on" if self.on else "at the end of its data"
        return (
            f"{self.trained} of {self.total} trained, version {self.version}, lineage {self.lineage}, "
            f"{self.members} rollouters, {state}"
        )


def must_be_on(now: Reading, when: str) -> None:
    if not now.on:
        raise Broken(
            f"the run was over {when} ({now}), so that this shows nothing; give more SAMPLES than {now.total}"
        )


def must_go_forward(before: Reading, now: Reading) -> None:
    """What never goes back, whatever is replaced in order."""
    for name in ("version", "term", "lineage", "issued", "trained"):
        was, found = getattr(before, name), getattr(now, name)
        if found < was:
            raise Broken(f"{name} went back from {was} to {found}")
    if now.missing:
        raise Broken(f"{now.missing} of {now.issued} issued samples are in no state")


def must_last(first: Reading, now: Reading, seconds: float) -> None:
    """Whether there is work for all of the story, at the rate that was seen in `seconds`."""
    rate = (now.trained - first.trained) / seconds
    left = (now.total - now.trained) / rate
    if left < PRODUCTIVE_S:
        enough = int(now.trained + rate * 3 * PRODUCTIVE_S)
        raise Broken(
            f"{rate:.1f} samples a second leave {left:.0f} s of work, and the steps need {PRODUCTIVE_S:g} s: "
            f"give SAMPLES={enough} or more"
        )


def limit_of_gate(window: int, threshold: float) -> int:
    """max_required of docs/staleness.md."""
    return window + int((Decimal(str(threshold)) * window).to_integral_value(ROUND_FLOOR))


def another_threshold(now: Reading) -> float:
    """One that moves the gate."""
    for threshold in (0.75, 0.5, 1.0):
        if limit_of_gate(now.window, threshold) != now.max_required:
            return threshold
    raise Broken(f"no threshold moves a gate of {now.max_required} in windows of {now.window}")


def must_keep_updates(before: Mapping[str, Any], now: Mapping[str, Any], what: str) -> None:
    """`headrace audit --json` before and after: whether updates were taken back."""
    lost = now["taken_back"] - before["taken_back"]
    if lost:
        raise Broken(f"{what}: {lost} trained samples were taken back, as no checkpoint held them")


def must_be_whole(audit: Mapping[str, Any], now: Reading) -> None:
    """At the end: everything was issued, and is trained, dead or dropped with a reason."""
    if not audit["balanced"]:
        raise Broken("the audit does not balance: " + "; ".join(audit["problems"]))
    ended = sum(audit["counts"][state] for state in ("trained", "dead", "dropped"))
    if ended != now.total or audit["issued_total"] != now.total:
        raise Broken(
            f"{now.total} samples were to be trained, {audit['issued_total']} were issued, and {ended} have "
            f"ended: {audit['counts']}"
        )
    trained = audit["counts"]["trained"]
    if audit["trained_once"] != trained:
        raise Broken(f"{trained} samples are trained, and {audit['trained_once']} by the trainer's own file")
