"""Handles the cluster's side of a run: pods that leave, deletion costs, Events, and the run's completion.

The run never depends on any of it. A call that fails is logged once until it works again, and repeated with a
growing pause; meanwhile leases do what they do everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import redis

from headrace.config.run import RunConfig
from headrace.ledger import ops
from headrace.ledger.client import LedgerError
from headrace.metrics import coordinator as metrics
from headrace.service import telemetry
from headrace_coordinator.kube.api import Cluster, ClusterError, Expired, Pod
from headrace_coordinator.kube.completion import Completion
from headrace_coordinator.kube.rules import Aggregator, costs_to_set
from headrace_coordinator.rounds.driver import Driver
from headrace_coordinator.rounds.notices import ConfigRefused, Fenced, RoundFailedNotice, Tuned
from headrace_coordinator.rounds.roster import replica_of

log = logging.getLogger("headrace.coordinator.kube")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_LOOK_S = 2.0
_LASTING_S = 10.0
"""A watch that ends sooner is restarted only after a pause, in seconds."""

Seen = tuple[str, Any]
"""From the watching thread: ("list", (pods,)) | ("event", (type, pod)) | ("failed", error) |
("ok", None)."""


class Agent:
    def __init__(self, config: RunConfig, driver: Driver, cluster: Cluster) -> None:
        self._settings = config.kubernetes
        self._run = config.name
        self._driver = driver
        self._cluster = cluster
        self.pods: dict[str, Pod] = {}
        self._cost_set_at: dict[str, float] = {}
        self._failing: set[str] = set()
        self._aggregator = Aggregator()
        self._reporter = os.environ.get("POD_NAME") or socket.gethostname()
        self._notices = driver.notices.listen()
        self._completion = Completion(config.name, driver, cluster, self._try, self._reporter)

    def follow(self, config: RunConfig) -> None:
        """Adopt what may change in a running run, from the next API call on."""
        self._settings = config.kubernetes
        self._cluster.timeout_s = config.kubernetes.request_timeout_s

    async def run(self) -> None:
        """Run forever. Nothing that the cluster does ends this. A bug ends all parts, after which it may be
        called again."""
        stop = threading.Event()
        try:
            async with asyncio.TaskGroup() as parts:
                parts.create_task(self._watch_pods(stop))
                parts.create_task(self._keep_costs())
                parts.create_task(self._write_events())
                parts.create_task(self._await_completion())
        finally:
            stop.set()

    # -- pods ------------------------------------------------------------------------------------

    async def _watch_pods(self, stop: threading.Event) -> None:
        seen: asyncio.Queue[Seen] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(*what: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(seen.put_nowait, what)

        threading.Thread(target=self._watch, args=(tell, stop), name="kube-watch", daemon=True).start()
        while True:
            kind, what = await seen.get()
            match kind:
                case "list":
                    await self._patiently("ledger", functools.partial(self._listed, *what))
                case "event":
                    await self._patiently("ledger", functools.partial(self._changed, *what))
                case "failed":
                    self._failed(what)
                case "ok":
                    self._failing -= {"pod_selector", "pods", "watch"}

    def _watch(self, tell: Callable[..., None], stop: threading.Event) -> None:
        """Thread: list the pods, watch from there until the watch ends, and list again.

        Relisting finds within minutes whatever a watch has missed. The pause between two lists grows until a
        watch has reported something or has lasted.
        """
        pause, selector = _FIRST_PAUSE_S, ""
        while not stop.is_set():
            try:
                if not selector:
                    selector = self._cluster.pod_selector(self._settings.rollouter_deployment)
                pods, version = self._cluster.pods(selector)
                tell("list", (pods,))
                began = time.monotonic()
                for kind, pod in self._cluster.watch(selector, version):
                    if stop.is_set():
                        return
                    tell("event", (kind, pod))
                    pause = _FIRST_PAUSE_S
                tell("ok", None)
                if time.monotonic() - began >= _LASTING_S:
                    pause = _FIRST_PAUSE_S
                    continue
            except Expired:  # expected
                pass
            except ClusterError as error:
                tell("failed", error)
            except Exception as error:  # whatever it was is not known well enough to go on there
                selector = ""
                unknown = ClusterError("watch", f"{type(error).__name__}: {error}", None)
                unknown.__cause__ = error
                tell("failed", unknown)
            stop.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _listed(self, pods: list[Pod]) -> None:
        """Handle a full list. A known pod of this Deployment that is not in it has gone."""
        stats = await self._driver.ledger.run(ops.stats())
        known = {*stats.members, *stats.in_flight_by_owner, *self._driver.connections.members}
        ours = f"{self._settings.rollouter_deployment}-"
        replicas = {replica for name in known if (replica := replica_of(name)).startswith(ours)}
        for name in sorted({*self.pods, *replicas} - {pod.name for pod in pods}):
            await self._missing(name)
        for pod in pods:
            await self._changed("MODIFIED", pod)

    async def _changed(self, kind: str, pod: Pod) -> None:
        if kind == "DELETED":
            await self._missing(pod.name)
            return
        if pod.ended:
            await self._gone(pod.name)
            return
        was = self.pods.get(pod.name)
        self.pods[pod.name] = pod
        if pod.leaving and not (was and was.leaving):
            log.info("rollouter is about to go", extra={"pod": pod.name})
        self._note_leaving()

    async def _missing(self, name: str) -> None:
        """Handle a pod that the selector did not find: gone, newer than the list, or relabelled."""
        found = await asyncio.to_thread(self._cluster.pod, name)
        self._failing.discard("pod")
        if found is None or found.ended:
            await self._gone(name)
        else:
            self.pods.pop(name, None)
            self._note_leaving()

    async def _gone(self, name: str) -> None:
        left = await self._driver.reports.replica_gone(name)
        was = self.pods.pop(name, None)
        self._cost_set_at.pop(name, None)
        self._note_leaving()  # only now, else it could be admitted once more
        if was or left:
            metrics.DRAINS.labels(reason="gone" if left else "in_order").inc()
            log.info("rollouter is gone", extra={"pod": name, "taken_back_from": left})

    def _note_leaving(self) -> None:
        self._driver.roster.leaving = frozenset(name for name, pod in self.pods.items() if pod.leaving)
        metrics.LEAVING.set(len(self._driver.roster.leaving))

    # -- deletion costs --------------------------------------------------------------------------

    async def _keep_costs(self) -> None:
        period = min(self._settings.deletion_cost_interval_s, 10.0)
        while True:
            await asyncio.sleep(period)
            tokens = await self._tokens()
            if tokens is None:
                continue
            there = {name: pod.cost for name, pod in self.pods.items() if not pod.leaving}
            now, every = time.monotonic(), self._settings.deletion_cost_interval_s
            for pod, cost in costs_to_set(there, tokens, self._cost_set_at, now, every).items():
                self._cost_set_at[pod] = now  # even if it fails, to limit the rate
                if not await self._try(self._cluster.set_deletion_cost, pod, cost):
                    break  # the API may be down: do not spend a deadline per pod

    async def _tokens(self) -> dict[str, int] | None:
        """Tokens in flight by pod, or None when the telemetry cannot be read."""
        try:
            raw = await self._driver.ledger.redis.hgetall(telemetry.telemetry_key(self._run))
            found = telemetry.decode_all(raw)  # type: ignore[arg-type]
        except (redis.RedisError, ValueError, TypeError):
            return None
        out: dict[str, int] = {}
        for incarnation, t in found.items():
            if incarnation in self._driver.connections.members:
                out[replica_of(incarnation)] = t.tokens_in_flight
        return out

    # -- Events ----------------------------------------------------------------------------------

    async def _write_events(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                notice = await asyncio.wait_for(self._notices.get(), self._aggregator.interval_s / 3)
                match notice:
                    case RoundFailedNotice(reason):
                        await self._event(
                            "Deployment", self._settings.trainer_deployment, "SyncFailed", reason
                        )
                    case Fenced(incarnation, reason):
                        note = (
                            f"{incarnation}: {reason}; its work goes back and what it still writes is refused"
                        )
                        await self._event("Pod", replica_of(incarnation), "ReplicaFenced", note)
                    case Tuned(what):
                        deployment = self._settings.trainer_deployment
                        await self._event("Deployment", deployment, "Tuned", what, warning=False)
                    case ConfigRefused(reason):
                        deployment = self._settings.trainer_deployment
                        await self._event("Deployment", deployment, "ConfigRefused", reason)
            for series in self._aggregator.overdue(time.monotonic()):
                await self._try(self._cluster.count_event, series.name, series.count, datetime.now(UTC))

    async def _event(self, kind: str, about: str, reason: str, note: str, warning: bool = True) -> bool:
        name = f"{about[:200]}.{uuid.uuid4().hex[:16]}"
        series = self._aggregator.seen(reason, about, name, time.monotonic())
        if series is None:
            return True
        now = datetime.now(UTC)
        if series.count > 1:
            return await self._try(self._cluster.count_event, series.name, series.count, now)
        written = await self._try(
            self._cluster.create_event, name, kind, about, reason, note, warning, self._reporter, now
        )
        if not written:
            self._aggregator.forget(series)
        return written

    # -- the end ---------------------------------------------------------------------------------

    async def _await_completion(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            if await self._completion.look(self._settings):
                pause = _FIRST_PAUSE_S
                await asyncio.sleep(_LOOK_S)
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    # -- failures --------------------------------------------------------------------------------

    async def _try(self, call: Callable[..., None], *args: Any) -> bool:
        """Make one API call, which has its own deadline. Returns whether it succeeded."""
        try:
            await asyncio.to_thread(call, *args)
        except ClusterError as error:
            self._failed(error)
            return False
        self._failing.discard(call.__name__)
        return True

    def _failed(self, error: ClusterError) -> None:
        metrics.CLUSTER_FAILURES.labels(operation=error.call).inc()
        if error.call not in self._failing:
            log.warning(
                "the Kubernetes API did not do it; the run goes on",
                extra={"error": str(error)},
                exc_info=error.__cause__,
            )
        self._failing.add(error.call)

    async def _patiently(self, what: str, act: Callable[[], Awaitable[None]]) -> None:
        """Retry until it succeeds: pod changes must not get lost while the ledger is down."""
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return await act()
            except ClusterError as error:
                self._failed(error)
            except LedgerError as error:
                log.warning("waiting", extra={"for": what, "error": str(error)})
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
