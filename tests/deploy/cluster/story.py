"""The story: install, scale, change, delete and restart while the run is on, then its end and the audit.

Every step begins and ends on a run that is on and goes on: one more update is trained before the next step.
Whatever is waited for, the readings on the way are judged too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from tests.deploy.cluster import judge
from tests.deploy.cluster.judge import Broken, Reading
from tests.deploy.cluster.site import NoAnswer, Site

T = TypeVar("T")
_RATE_UPDATES = 4


@dataclass(frozen=True)
class Limits:
    """Seconds, for clusters of any speed; nothing here is waited for longer than it takes."""

    poll: float = 2.0
    install: float = 900.0
    answer: float = 120.0
    """Of a pod that is asked while others are replaced."""
    update: float = 600.0
    """Until one more update is trained, engines that start anew included."""
    change: float = 900.0
    """Until pods are there, gone or new."""
    end: float = 7200.0


class Story:
    def __init__(
        self,
        site: Site,
        say: Callable[[str], None],
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._site = site
        self._say = say
        self._limits = limits or Limits()
        self._clock = clock
        self._pause = pause
        self._last: Reading | None = None

    def tell(self) -> None:
        """From an empty namespace to an empty namespace. Raises Broken."""
        self._say("install")
        self._site.install(int(self._limits.install // 60))
        rollouters = self._site.rollouters()
        self._begin(rollouters)
        with self._step(f"scale to {rollouters + 1}: the new one is ready and generates"):
            self._scale_up(rollouters + 1)
        with self._step("change the gate: no pod is replaced, and the number of rollouters stays"):
            self._change_the_gate(rollouters + 1)
        with self._step("what the run was begun with cannot change"):
            said = self._site.refuses({"config.seed": 7})
            if "config.seed" not in said:
                raise Broken(f"the refusal does not name the key: {said}")
        gone = "delete the coordinator: the next one takes the next term"
        with self._step(gone), self._no_update_is_lost("the coordinator was deleted"):
            self._delete_the_coordinator()
        with self._step("delete a rollouter"), self._no_update_is_lost("a rollouter was deleted"):
            self._delete_a_rollouter(rollouters + 1)
        with self._step("restart everything"), self._no_update_is_lost("everything was restarted"):
            self._restart_everything(rollouters + 1)
        with self._step("another learning rate"), self._no_update_is_lost("the learning rate was changed"):
            self._change_the_learning_rate()
        with self._step("no rollouters, then as many as at first"), self._no_update_is_lost("scaled to zero"):
            self._to_zero_and_back(rollouters)
        self._end()

    # -- steps -----------------------------------------------------------------------------------

    def _begin(self, rollouters: int) -> None:
        """Every rollouter takes part, updates are trained, and there is work for all of the story."""
        self._until(lambda now: now.members >= rollouters, f"{rollouters} rollouters to take part")
        first = self._until(lambda now: now.trained > 0, "the first update", self._limits.update)
        began = self._clock()
        now = self._until(
            lambda now: now.version >= first.version + _RATE_UPDATES and now.trained > first.trained,
            f"{_RATE_UPDATES} versions more",
            self._limits.update,
        )
        judge.must_last(first, now, self._clock() - began)

    def _scale_up(self, count: int) -> None:
        there = set(self._site.pods("rollouter"))
        self._site.scale(count)
        self._all_ready("rollouter", count)
        for pod in set(self._site.pods("rollouter")) - there:
            self._until(self._generates(pod), f"{pod} to generate")

    def _generates(self, pod: str) -> Callable[[Reading], bool]:
        return lambda _: self._ask(lambda: self._site.generated(pod)) > 0

    def _change_the_gate(self, count: int) -> None:
        pods, now = set(self._site.all_pods()), self._read()
        threshold = judge.another_threshold(now)
        limit = judge.limit_of_gate(now.window, threshold)
        self._site.upgrade({"config.async_training.staleness_threshold": threshold})
        self._until(lambda now: now.max_required == limit, f"the ledger's gate to be {limit}")
        if (found := set(self._site.all_pods())) != pods:
            raise Broken(f"pods were replaced by a change of the gate: {sorted(pods ^ found)}")
        if (replicas := self._site.rollouters()) != count:
            raise Broken(f"the upgrade set the number of rollouters from {count} to {replicas}")

    def _delete_the_coordinator(self) -> None:
        before = self._read()
        (pod,) = self._site.pods("coordinator")
        self._site.delete(pod)
        self._until(lambda now: now.term > before.term, f"a term after {before.term}")
        self._until(lambda now: now.version > before.version, f"a version after {before.version}")
        self._all_ready("coordinator", 1)

    def _delete_a_rollouter(self, count: int) -> None:
        pod = sorted(self._site.pods("rollouter"))[0]
        self._site.delete(pod)
        self._until(lambda _: pod not in self._ask(lambda: self._site.pods("rollouter")), f"{pod} to be gone")
        self._all_ready("rollouter", count)

    def _restart_everything(self, count: int) -> None:
        before = set(self._site.all_pods())
        lineage = self._read().lineage
        self._site.restart_everything()

        def replaced(_: Reading) -> bool:
            found = self._ask(self._site.all_pods)
            return not before & set(found) and all(found.values())

        self._until(replaced, "every pod to be replaced and ready")
        self._all_ready("rollouter", count)
        self._until(lambda now: now.lineage > lineage, "the trainer to have begun anew")

    def _change_the_learning_rate(self) -> None:
        last = self._ask(self._site.status)["last_update"]
        (trainer,) = self._site.pods("trainer")
        rate = last["actor/lr"] / 2
        self._site.upgrade({"config.actor.optim.lr": rate})

        def trains(_: Reading) -> bool:
            now = self._ask(self._site.status)["last_update"]
            return now["step"] > last["step"] and abs(now["actor/lr"] - rate) < 1e-3 * rate

        self._until(trains, f"updates with a learning rate of {rate:g}")
        if trainer in self._site.pods("trainer"):
            raise Broken(f"{trainer} goes on, and did not read its configuration anew")

    def _to_zero_and_back(self, count: int) -> None:
        self._site.scale(0)
        self._until(lambda now: not now.members, "no rollouter to take part")
        self._until(lambda _: not self._ask(lambda: self._site.pods("rollouter")), "no rollouter's pod")
        self._site.scale(count)
        self._all_ready("rollouter", count)

    def _end(self) -> None:
        self._say("wait for the end")
        now = self._until(lambda now: now.completed, "the run to complete", self._limits.end, on=False)
        judge.must_be_whole(self._ask(self._site.audit), now)
        self._say(f"complete and balanced: {now}")
        self._site.test()
        self._say("uninstall leaves two volumes")
        left = self._site.uninstall()
        release = self._site.release
        expected = [
            f"persistentvolumeclaim/data-{release}-redis-0",
            f"persistentvolumeclaim/{release}-checkpoints",
        ]
        if left != sorted(expected):
            raise Broken(f"the volumes {expected} were to stay, and there are {left}")

    # -- waiting and judging ---------------------------------------------------------------------

    @contextmanager
    def _step(self, what: str) -> Iterator[None]:
        self._say(what)
        judge.must_be_on(self._read(), f"before the step: {what}")
        yield
        after = self._read()
        judge.must_be_on(after, f"at the end of the step: {what}")
        now = self._until(lambda now: now.trained > after.trained, "one more update", self._limits.update)
        self._say(f"  {now}")

    @contextmanager
    def _no_update_is_lost(self, what: str) -> Iterator[None]:
        before = self._ask(self._site.audit)
        yield
        judge.must_keep_updates(before, self._ask(self._site.audit), what)

    def _until(
        self,
        condition: Callable[[Reading], bool],
        what: str,
        limit_s: float | None = None,
        *,
        on: bool = True,
    ) -> Reading:
        """Read until `condition` holds. `on`: for as long the run has to be on."""
        limit_s = limit_s or self._limits.change
        began = self._clock()
        while True:
            now = self._read()
            waited = self._clock() - began
            if on:
                judge.must_be_on(now, f"after {waited:.0f} s of waiting for {what}")
            if condition(now):
                return now
            if waited > limit_s:
                raise Broken(f"waited {limit_s:g} s in vain for {what} ({now})")
            self._pause(self._limits.poll)

    def _all_ready(self, component: str, count: int) -> None:
        def ready(_: Reading) -> bool:
            found = self._ask(lambda: self._site.pods(component))
            return len(found) == count and all(found.values())

        self._until(ready, f"{count} ready pods of {component}")

    def _read(self) -> Reading:
        now = Reading.of(self._ask(self._site.stats))
        if self._last is not None:
            judge.must_go_forward(self._last, now)
        self._last = now
        return now

    def _ask(self, question: Callable[[], T]) -> T:
        """The answer, through pods that are replaced."""
        deadline = self._clock() + self._limits.answer
        while True:
            try:
                return question()
            except NoAnswer as error:
                if self._clock() > deadline:
                    raise Broken(f"no answer for {self._limits.answer:g} s: {error}") from None
            self._pause(self._limits.poll)
