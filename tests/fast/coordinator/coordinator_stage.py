"""The coordinator without a network: its real driver and servicer, scripted peers, and a clock that stands.

The ledger is the reference model. Peers are those of the process tests: they answer each command at once and
properly unless a scenario says otherwise. Time passes only in `Stage.advance`, so a timeout of minutes costs
nothing and what happens within one instant comes in the same order every time.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import AsyncIterator
from typing import Any

import grpc

from headrace.config.run import RunConfig
from headrace.ledger.in_memory import InMemoryLedger
from headrace.ledger.ops import Op
from headrace.ledger.replies import ExpireReply
from headrace.v1 import sync_pb2 as pb
from headrace_coordinator.rounds.driver import Driver
from headrace_coordinator.servicer import CoordinatorServicer
from tests.support.coordinator_peers import HungUp, Member, Peer, Trainer


class _Idle(selectors.SelectSelector):
    """Never waits: a loop that has nothing to do but to wait is stopped instead."""

    loop: StandingClock

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or timeout > 0:
            self.loop.next_timer_s = timeout
            self.loop.stop()
        return []


class StandingClock(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 1000.0
        self.next_timer_s: float | None = None
        """Seconds until the next timer of an idle loop; None without one."""
        idle = _Idle()
        idle.loop = self
        super().__init__(idle)

    def time(self) -> float:
        return self.now

    def settle(self) -> None:
        """Everything that can happen without the time passing happens."""
        self.run_forever()

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self.next_timer_s is not None and self.now + self.next_timer_s <= end:
            self.now += self.next_timer_s
            self.settle()
        self.now = end


class StagedLedger:
    """The model behind the client's interface. Replies can be kept back from one operation on."""

    def __init__(self, stage: Stage) -> None:
        self.model = InMemoryLedger()
        self.model.configure(8, 4, 1, 1, 1000, "print")
        self._stage = stage
        self._replies = asyncio.Event()
        self._replies.set()
        self._held_from = ""

    def hold_from(self, script: str) -> None:
        self._held_from = script

    def let_go(self) -> None:
        self._held_from = ""
        self._replies.set()

    def drop_held(self) -> None:
        """Whoever waited for the replies is gone."""
        self._replies = asyncio.Event()
        self.let_go()

    async def run(self, op: Op[Any]) -> Any:
        reply = self._apply(op.script, list(op.args))
        if op.script == self._held_from:
            self._replies.clear()
        await self._replies.wait()
        return reply

    def _apply(self, script: str, args: list[Any]) -> Any:
        m, say = self.model, self._stage.say
        match script:
            case "open_term" | "stats" | "val_status":
                return getattr(m, script)()
            case "hold":
                reply = m.hold(*args)
                say(f"ledger: hold round={args[1]} lineage={args[2]}: {reply}")
                return reply
            case "commit":
                term, round_, lineage, version, digest, validate, final, max_required, *members = args
                outcome = m.commit(
                    term, round_, lineage, version, digest, members, bool(validate), bool(final), max_required
                )
                say(f"ledger: commit version={version} members={','.join(members) or '-'}: {outcome.status}")
                return outcome
            case "admit":
                reply = m.admit(*args)
                say(f"ledger: admit {args[1]} version={args[2]}: {reply}")
                return reply
            case "expire":
                return self.expire(args[0], args[1], bool(args[3]))
            case "val_close":
                say(f"ledger: close the validation of version {args[0]}")
                return m.val_close(*args)
        raise AssertionError(f"the model is not asked for {script} here")

    def expire(self, name: str, reason: str, left: bool = False) -> ExpireReply:
        reply = self.model.expire(name, reason, left=left)
        back = f", samples that go back: {len(reply.requeued)}" if reply.requeued else ""
        self._stage.say(f"ledger: expire {name} ({reason}){back}")
        return reply

    def open_lineage(self) -> int:
        """What a trainer does first at its start."""
        m = self.model
        assert m.open_lineage(m.lineage, f"lineage {m.lineage + 1}").ok
        m.finish_adopt(m.lineage)
        return m.lineage


class Refused(Exception):
    pass


class _Context:
    """What the servicer needs of a gRPC call."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Refused(f"{code.name}: {details}")


class Staged(Peer):
    """A scripted peer that talks to the servicer itself."""

    def __init__(self, stage: Stage, *args: Any, **state: Any) -> None:
        super().__init__("", *args, **state)
        self.stage = stage
        self.hangs_up_at = ""

    @property
    def label(self) -> str:
        raise NotImplementedError

    async def connect(self) -> None:
        await self.close()
        self._out = asyncio.Queue()
        self.report(hello=self.hello())
        call = getattr(self.stage.servicer, self.method)(self._reports(), _Context())
        self._reader = asyncio.create_task(self._listen(call))

    async def _listen(self, call: AsyncIterator[Any]) -> None:
        async with contextlib.aclosing(call):  # type: ignore[type-var]
            try:
                async for command in call:
                    self.heard.append(command)
                    kind = command.WhichOneof("command")
                    self.stage.say(f"{self.label} <- {told(command)}")
                    if kind == self.hangs_up_at:
                        raise HungUp
                    answer = self.answers.get(kind, lambda c, kind=kind: self.proper(kind, c))(command)
                    if answer is not None:
                        self.report(**answer)
                self.stage.say(f"{self.label}: the stream is ended")
            except HungUp:
                self.stage.say(f"{self.label}: hangs up")
            except Refused as error:
                self.stage.say(f"{self.label!r} is refused: {error}")

    def raise_failure(self) -> None:
        """A peer that broke is a fault of the test."""
        if self._reader is not None and self._reader.done() and not self._reader.cancelled():
            self._reader.result()


class StagedMember(Staged, Member):
    streams = 1

    @property
    def label(self) -> str:
        return self.name + "'" * (self.streams - 1)


class StagedTrainer(Staged, Trainer):
    @property
    def label(self) -> str:
        return f"trainer{self.lineage}"


def told(command: pb.MemberCommand | pb.TrainerCommand) -> str:
    """One command in one line: what a reader needs to judge it."""
    kind = command.WhichOneof("command") or "nothing"
    c = getattr(command, kind)
    match kind:
        case "welcome":
            words = [f"version={c.committed_version}"]
        case "pause":
            words = [f"round={c.round}"]
            words += [f"finish_through={c.finish_through}"] if c.HasField("finish_through") else []
            words += ["drop_work"] if c.drop_work else []
        case "join":
            words = [f"session={c.session}", f"epoch={c.rendezvous.epoch}"]
            words += [f"rank={c.rank_offset} of {c.rendezvous.world_size}"]
        case "form":
            words = [f"session={c.session}", f"epoch={c.rendezvous.epoch}", f"of {c.rendezvous.world_size}"]
        case "load":
            words = [f"session={c.session}", f"version={c.manifest.version}"]
        case "send":
            words = [f"session={c.session}", f"version={c.version}"]
        case "resume":
            canary = c.canary.token_ids[0] - 1 if c.canary.token_ids else "none"
            words = [f"version={c.version}", f"canary={canary}"]
        case "committed":
            words = [f"version={c.version}", f"round={c.round}", f"members={c.members}"]
            words += [f"attempts={c.attempts}"]
        case "canary":
            words = [f"version={c.version}", f"of {c.incarnation}"]
        case "expelled" | "rejected":
            words = [f"({c.reason})"]
        case _:
            words = [str(c).replace("\n", " ").strip()]
    term = [f"term={command.term}"] if command.term > 1 else []
    return " ".join([kind, *words, *term])


class Stage:
    """One run: its ledger, one coordinator at a time, and the peers that talk to it."""

    def __init__(self, loop: StandingClock) -> None:
        self.loop = loop
        self.lines: list[str] = []
        self.ledger = StagedLedger(self)
        self.peers: dict[str, Staged] = {}
        self.config = RunConfig.model_validate(settings_of({}))
        self.driver: Driver
        self.servicer: CoordinatorServicer
        self._work: asyncio.Task[None] | None = None

    def say(self, line: str) -> None:
        self.lines.append(line)

    def settle(self) -> None:
        self.loop.settle()
        work = self._work
        if work is not None and work.done() and not work.cancelled():
            self.say(f"coordinator: ends, {work.exception()}")
            self._work = None
        for peer in self.peers.values():
            peer.raise_failure()

    def do(self, coroutine: Any) -> None:
        """Run it to its end, and whatever follows from it."""
        task = self.loop.create_task(coroutine)
        self.settle()
        if task.done():
            task.result()

    def start(self, settings: dict[str, Any]) -> None:
        """A coordinator process starts, on the same ledger as the one before it."""
        self.config = RunConfig.model_validate(settings_of(settings))
        self.driver = Driver(self.config, self.ledger)  # type: ignore[arg-type]
        self.servicer = CoordinatorServicer(self.driver)
        self.do(self.driver.recover())
        status = self.status()
        self.say(f"coordinator: serves, term={status.term} version={status.version}")
        self._work = self.loop.create_task(self.driver.run())
        self.settle()

    def status(self) -> pb.GetStatusReply:
        """What `headrace status` asks for."""
        found: list[pb.GetStatusReply] = []

        async def ask() -> None:
            found.append(await self.servicer.GetStatus(pb.GetStatusRequest(), _Context()))  # type: ignore[arg-type]

        self.do(ask())
        return found[0]

    def kill(self) -> None:
        """It runs no line more; the peers see their streams break."""
        if self._work is not None:
            self._work.cancel()
            self._work = None
        self.ledger.drop_held()
        for peer in self.peers.values():
            self.do(peer.close())

    def close(self) -> None:
        self.kill()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.settle()

    def advance(self, seconds: float) -> None:
        self.loop.advance(seconds)
        self.settle()


def settings_of(changed: dict[str, Any]) -> dict[str, Any]:
    """Those of a run that needs no files; `changed` by dotted key."""
    settings: dict[str, Any] = {
        "name": "staged",
        "model": {"path": "nowhere"},
        "data": {"train_files": ["nowhere.jsonl"]},
        "rollout": {"n": 2, "total_rollout_steps": 1000, "test_freq": 0},
        "actor": {"ppo_mini_batch_size": 4},
        "async_training": {"staleness_threshold": 1},
        "custom_reward_function": {"path": "headrace.demo.reward"},
    }
    for dotted, value in changed.items():
        section, key = dotted.split(".")
        settings.setdefault(section, {})[key] = value
    return settings
