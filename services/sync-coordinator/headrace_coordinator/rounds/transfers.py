"""Carries out one session: sends the state machine's actions and feeds it the events that come back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from headrace.config.run import RunConfig
from headrace.metrics import coordinator as metrics
from headrace.v1 import sync_pb2 as pb
from headrace_coordinator.connections import Connections
from headrace_coordinator.rounds import session as s
from headrace_coordinator.rounds.timings import Timings

log = logging.getLogger("headrace.coordinator")

_RENDEZVOUS_GRACE_S = 5.0
"""The coordinator waits a little longer than the ranks themselves, so that their own error comes first."""

CommitCall = Callable[[tuple[str, ...], str], Awaitable[s.CommitAnswer]]
"""Commits (members, digest) to the ledger."""
ExpireCall = Callable[[str, str], Awaitable[None]]
"""Expires an incarnation, for a reason."""


class Transfers:
    """Runs one session at a time. The weight group outlives the session, so that the next can reuse it."""

    def __init__(self, config: RunConfig, connections: Connections, expire: ExpireCall) -> None:
        self.config = config
        self.connections = connections
        self.session: s.TransferSession | None = None
        self.group: tuple[str, ...] | None = None
        """Members of the last weight group, besides the trainer."""
        self._expire = expire
        self._id = 0
        """Id of the running transfer: one per attempt, unique within a term."""
        self._events: asyncio.Queue[s.Event] = asyncio.Queue()
        self._progress_at = 0.0

    # -- what the streams report -----------------------------------------------------------------

    def event(self, event: s.Event) -> None:
        if self.session is not None:
            self._events.put_nowait(event)

    def progress(self) -> None:
        """Note that a member that is letting work finish has generated tokens."""
        self._progress_at = time.monotonic()

    def attempt_of(self, session_id: int) -> int | None:
        """The running session's attempt that `session_id` names, or None if it is older."""
        if self.session is None or session_id != self._id:
            return None
        return self.session.attempt

    # -- one session -----------------------------------------------------------------------------

    async def run(
        self,
        session: s.TransferSession,
        round_: int,
        manifest: pb.Manifest,
        commit: CommitCall,
        clock: Timings,
    ) -> None:
        """Run the session until it has ended."""
        self._events = asyncio.Queue()
        self._id += 1
        self._progress_at = time.monotonic()
        self.session = session
        try:
            actions = session.start()
            phase, attempt, entered = s.Phase.PAUSING, 0, time.monotonic()
            while True:
                for action in actions:
                    await self._act(action, round_, manifest, commit)
                if (session.phase, session.attempt) != (phase, attempt):
                    now = time.monotonic()
                    if phase is s.Phase.PAUSING:
                        clock.paused = now
                    if session.phase is s.Phase.COMMITTING:
                        clock.transferred = now
                    # Every phase of every attempt gets its full deadline.
                    phase, attempt, entered = session.phase, session.attempt, now
                if phase.ended:
                    return
                actions = session.on(await self._next_event(session, entered))
        finally:
            self.session = None
            if session.phase is not s.Phase.DONE:
                self.group = None  # who broke it off may have left it

    async def _next_event(self, session: s.TransferSession, entered: float) -> s.Event:
        c = self.config.sync
        interrupts = self.config.rule.crosses is None
        while True:
            match session.phase:
                case s.Phase.PAUSING:
                    limit = c.pause_timeout_s if interrupts else c.drain_stall_s
                case s.Phase.FORMING:
                    limit = c.rendezvous_timeout_s + _RENDEZVOUS_GRACE_S
                case _:
                    limit = c.transfer_timeout_s
            # While work is allowed to finish, the deadline counts from the last token progress.
            since = entered if interrupts else max(entered, self._progress_at)
            left = since + limit - time.monotonic()
            if left <= 0:
                log.warning(
                    "deadline", extra={"phase": str(session.phase), "waiting": sorted(session.waiting)}
                )
                return s.Deadline(limit)
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(self._events.get(), min(left, 1.0))

    async def _act(self, action: s.Action, round_: int, manifest: pb.Manifest, commit: CommitCall) -> None:
        match action:
            case s.Pause(who):
                self.pause(who, round_, manifest.version)
            case s.Form(_, members):
                self._form(members)
            case s.Transfer(_, members):
                for name in members:
                    load = pb.Load(session=self._id, manifest=manifest)
                    self._to_member(name, pb.MemberCommand(load=load))
                send = pb.Send(session=self._id, version=manifest.version)
                self.connections.send_trainer(pb.TrainerCommand(send=send))
            case s.Expire(who, reason):
                metrics.SYNC_FAILURES.labels(reason="member").inc()
                await self._expire(who, reason)
            case s.Commit(members, digest):
                answer = await commit(members, digest)
                # The ledger has decided. Events that came meanwhile, even a lost trainer, cannot change that.
                self._events = asyncio.Queue()
                self._events.put_nowait(answer)

    def pause(self, name: str, round_: int, version: int) -> None:
        """Ask a member to pause. `version`: the one that it will run afterwards."""
        pause = pb.MemberPause(
            round=round_,
            finish_through=self.config.rule.finish_through(version),
            drop_work=name not in self.connections.taking_part,
        )
        self.connections.send_member(name, pb.MemberCommand(pause=pause))

    def _to_member(self, name: str, command: pb.MemberCommand) -> None:
        """Send to a member that must act now. Without a stream it counts as lost."""
        if not self.connections.send_member(name, command):
            self._events.put_nowait(s.Lost(name))

    def _form(self, members: tuple[str, ...]) -> None:
        self._id += 1
        trainer = self.connections.trainer
        if trainer is None:
            return  # TrainerLost is on its way
        connected = self.connections.members
        workers = {name: connected[name].workers if name in connected else 0 for name in members}
        rendezvous = pb.Rendezvous(
            host=trainer.store_host,
            port=trainer.store_port,
            epoch=self.connections.term * 1_000_000 + self._id,
            world_size=1 + sum(workers.values()),
            transport=self.config.sync.transport,
            timeout_s=self.config.sync.rendezvous_timeout_s,
        )
        self.group = members
        rank = 1
        for name in members:
            join = pb.JoinGroup(session=self._id, rendezvous=rendezvous, rank_offset=rank)
            self._to_member(name, pb.MemberCommand(join=join))
            rank += workers[name]
        form = pb.FormGroup(session=self._id, rendezvous=rendezvous)
        self.connections.send_trainer(pb.TrainerCommand(form=form))
