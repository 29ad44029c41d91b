"""The story of `make test-cluster`, told of clusters that keep their promises and of ones that do not.

The clusters are simulated, in a time of their own: a run that trains while it has rollouters and a trainer.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import pytest

from tests.deploy.cluster import judge
from tests.deploy.cluster.judge import Broken, Reading
from tests.deploy.cluster.site import NoAnswer
from tests.deploy.cluster.story import Limits, Story

START_S = 60.0
"""Of a pod, from its making to its readiness."""
PER_S = 10.0
"""Samples that a rollouter generates; the trainer keeps up."""


class Simulated:
    """Stands in for a `Site`. Everything that it promises is a method that a test can break."""

    release = "demo"

    def __init__(self, total: int = 25_600) -> None:
        self.total, self.now = total, 0.0
        self.trained = 0.0
        self.issued = 0
        self.version = self.term = self.lineage = 1
        self.max_required, self.window = 48, 32
        self.lr, self.taken_back = 5e-4, 0
        self.replicas = 2
        self.made: dict[str, tuple[str, float]] = {}  # component and birth of each pod
        self.generates: dict[str, float] = {}
        self._numbers = itertools.count()
        self.left = ["persistentvolumeclaim/data-demo-redis-0", "persistentvolumeclaim/demo-checkpoints"]
        self.did: list[str] = []

    # -- the world -------------------------------------------------------------------------------

    def pause(self, seconds: float) -> None:
        self.now += seconds
        ready = self._ready()
        if not ready or not all(ready[p] for p, (c, _) in self.made.items() if c in ("trainer", "queue")):
            return
        for pod in (p for p in ready if ready[p] and self.made[p][0] == "rollouter"):
            more = min(PER_S * seconds, self.total - self.trained)
            self.trained += more
            self.generates[pod] = self.generates.get(pod, 0.0) + more
        self.version = 1 + int(self.trained // self.window)

    def add(self, component: str, count: int = 1) -> None:
        for _ in range(count):
            number = 0 if component == "redis" else next(self._numbers)
            self.made[f"demo-{component}-{number}"] = (component, self.now)

    def remove(self, component: str) -> int:
        gone = [pod for pod, (its, _) in self.made.items() if its == component]
        for pod in gone:
            del self.made[pod]
        return len(gone)

    def replace(self, component: str) -> None:
        self.add(component, self.remove(component))
        self.lineage += component == "trainer"
        self.term += component == "coordinator"

    # -- a Site's --------------------------------------------------------------------------------

    def install(self, minutes: int) -> None:
        for component in ("queue", "coordinator", "trainer", "redis"):
            self.add(component)
        self.add("rollouter", 2)
        self.now += 2 * START_S

    def upgrade(self, changes: Mapping[str, Any]) -> None:
        for key, value in changes.items():
            self.did.append(key.rpartition(".")[2])
            if key.endswith("staleness_threshold"):
                self.gate(value)
            else:
                self.lr = value
                self.replace("trainer")

    def gate(self, threshold: float) -> None:
        self.max_required = self.window + int(threshold * self.window)

    def refuses(self, changes: Mapping[str, Any]) -> str:
        return "config.seed: was 0"

    def scale(self, rollouters: int) -> None:
        self.did.append(f"scale {rollouters}")
        self.replicas = rollouters
        there = [pod for pod, (c, _) in self.made.items() if c == "rollouter"]
        for pod in there[rollouters:]:
            del self.made[pod]
        self.add("rollouter", rollouters - len(there))

    def delete(self, pod: str) -> None:
        component, _ = self.made.pop(pod)
        self.did.append(f"delete {component}")
        self.add(component)
        self.term += component == "coordinator"

    def restart_everything(self) -> None:
        self.did.append("restart")
        for component in ("queue", "coordinator", "trainer", "redis", "rollouter"):
            self.replace(component)

    def test(self) -> None:
        self.did.append("test")

    def uninstall(self) -> list[str]:
        self.did.append("uninstall")
        return self.left

    def stats(self) -> dict[str, Any]:
        trained = int(self.trained)
        over = self.trained >= self.total
        self.issued = max(self.issued, min(trained + 10, self.total))
        return {
            "counts": {"trained": trained, "queued": self.issued - trained, "dead": 0, "dropped": 0},
            "issued_total": self.issued,
            "members": {p: 1 for p, (c, _) in self.made.items() if c == "rollouter" and self._ready()[p]},
            "end_of_data": over,
            "completed": over,
            **{
                k: getattr(self, k) for k in ("total", "version", "term", "lineage", "max_required", "window")
            },
        }

    def status(self) -> dict[str, Any]:
        return {"last_update": {"step": self.version, "actor/lr": self.lr}}

    def audit(self) -> dict[str, Any]:
        counts = {"trained": int(self.trained), "dead": 0, "dropped": 0}
        return {
            "balanced": True,
            "problems": [],
            "counts": counts,
            "issued_total": self.total,
            "trained_once": counts["trained"],
            "taken_back": self.taken_back,
        }

    def generated(self, pod: str) -> int:
        return int(self.generates.get(pod, 0))

    def pods(self, component: str) -> dict[str, bool]:
        return {pod: ready for pod, ready in self._ready().items() if self.made[pod][0] == component}

    def all_pods(self) -> dict[str, bool]:
        return {f"{pod} {self.made[pod][1]}": ready for pod, ready in self._ready().items()}

    def _ready(self) -> dict[str, bool]:
        return {pod: self.now - born >= START_S for pod, (_, born) in self.made.items()}

    def rollouters(self) -> int:
        return self.replicas


def tell(site: Simulated) -> list[str]:
    said: list[str] = []
    Story(site, said.append, Limits(), lambda: site.now, site.pause).tell()  # type: ignore[arg-type]
    return said


def test_a_cluster_that_keeps_its_promises() -> None:
    site = Simulated()
    said = tell(site)
    assert site.did == [
        "scale 3", "staleness_threshold", "delete coordinator", "delete rollouter", "restart", "lr",
        "scale 0", "scale 2", "test", "uninstall",
    ]  # fmt: skip
    assert site.trained == site.total
    assert said[-2].startswith("complete and balanced: 25600 of 25600 trained")


class Late(Simulated):
    """The fault that this program is for: the run is over before the third rollouter is ready."""

    def add(self, component: str, count: int = 1) -> None:
        super().add(component, count)
        if component == "rollouter" and self.now > 0 and count:
            for pod in list(self.made)[-count:]:
                self.made[pod] = (component, self.now + 10_000.0)


def test_a_run_that_ends_before_the_third_rollouter_is_ready() -> None:
    with pytest.raises(Broken) as broken:
        tell(Late(total=8000))
    assert re.search(
        r"the run was over after \d+ s of waiting for 3 ready pods of rollouter", str(broken.value)
    )
    assert "so that this shows nothing; give more SAMPLES than 8000" in str(broken.value)


@pytest.mark.parametrize("total", [300, 2560])
def test_a_run_that_cannot_last(total: int) -> None:
    """The demo's own size is one, at this rate; what the message asks for is enough."""
    with pytest.raises(Broken, match=r"give SAMPLES=|the run was over") as broken:
        tell(Simulated(total))
    if total == 2560:
        tell(Simulated(int(str(broken.value).partition("SAMPLES=")[2].split()[0])))


@pytest.mark.parametrize("step", range(2, 9))
def test_every_step_is_on_a_run_that_is_on(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever step the run ends in, it is found out there and not at the end."""
    site = Simulated()
    said: list[str] = []

    def say(what: str) -> None:
        if not what.startswith(" "):
            said.append(what)
        if len(said) == step:
            site.trained = float(site.total)

    with pytest.raises(Broken, match="the run was over"):
        Story(site, say, Limits(), lambda: site.now, site.pause).tell()  # type: ignore[arg-type]
    assert len(said) == step


def broken_by(name: str, instead: Callable[..., Any]) -> Simulated:
    site = Simulated(60_000)  # longer than what is waited for in vain
    setattr(site, name, instead.__get__(site))
    return site


def _trained_falls(site: Simulated) -> None:
    Simulated.restart_everything(site)
    site.trained -= 100


def _takes_back(site: Simulated) -> None:
    Simulated.restart_everything(site)
    site.taken_back += 24


def _same_trainer(site: Simulated, changes: Mapping[str, Any]) -> None:
    site.gate(0.75)
    site.lr = changes.get("config.actor.optim.lr", site.lr)


def _replaces_pods(site: Simulated, threshold: float) -> None:
    Simulated.gate(site, threshold)
    site.replace("queue")


def _no_new_term(site: Simulated, pod: str) -> None:
    term = site.term
    Simulated.delete(site, pod)
    site.term = term


def _resets_the_number(site: Simulated, threshold: float) -> None:
    Simulated.gate(site, threshold)
    site.replicas = 2


def _loses_some(site: Simulated) -> dict[str, Any]:
    found = Simulated.audit(site)
    return found | {"issued_total": site.total - 1}


def _in_no_state(site: Simulated) -> dict[str, Any]:
    found = Simulated.stats(site)
    return found | {"issued_total": found["issued_total"] + 1}


BROKEN: list[tuple[str, Callable[..., Any], str]] = [
    ("restart_everything", _trained_falls, "trained went back from"),
    ("restart_everything", _takes_back, "everything was restarted: 24 trained samples were taken back"),
    ("restart_everything", lambda site: None, "in vain for every pod to be replaced"),
    ("gate", lambda site, threshold: None, "in vain for the ledger's gate to be 56"),
    ("gate", _replaces_pods, "pods were replaced by a change of the gate"),
    ("gate", _resets_the_number, "set the number of rollouters from 3 to 2"),
    ("refuses", lambda site, changes: "no", "does not name the key"),
    ("delete", _no_new_term, "in vain for a term after 1"),
    ("upgrade", _same_trainer, "goes on, and did not read its configuration anew"),
    ("generated", lambda site, pod: 0, "to generate"),
    ("scale", lambda site, count: None, "in vain for 3 ready pods of rollouter"),
    ("audit", _loses_some, "60000 samples were to be trained, 59999 were issued"),
    ("stats", _in_no_state, "1 of "),
    ("uninstall", lambda site: [], "were to stay, and there are []"),
]


@pytest.mark.parametrize(("name", "instead", "told"), BROKEN, ids=[told for _, _, told in BROKEN])
def test_promises_that_are_not_kept(name: str, instead: Callable[..., Any], told: str) -> None:
    with pytest.raises(Broken) as broken:
        tell(broken_by(name, instead))
    assert told in str(broken.value)


def test_pods_that_do_not_answer_are_asked_again_for_a_while() -> None:
    turns = itertools.count(1)

    def sometimes(site: Simulated) -> dict[str, Any]:
        if next(turns) % 3:
            raise NoAnswer("pod is being replaced")
        return Simulated.stats(site)

    tell(broken_by("stats", sometimes))

    def never(site: Simulated) -> dict[str, Any]:
        raise NoAnswer("error: unable to upgrade connection")

    with pytest.raises(Broken, match="no answer for 120 s: error: unable to upgrade connection"):
        tell(broken_by("stats", never))


def test_nothing_goes_back() -> None:
    now = Reading.of(Simulated().stats())
    later = Reading(**asdict(now) | {"trained": 64, "version": 3, "term": 2})
    with pytest.raises(Broken, match="trained went back from 64 to 32"):
        judge.must_go_forward(later, Reading(**asdict(later) | {"trained": 32}))
    with pytest.raises(Broken, match="version went back from 3 to 2"):
        judge.must_go_forward(later, Reading(**asdict(later) | {"version": 2}))
