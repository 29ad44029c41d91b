"""Scenario files: what happens to a coordinator, and what it does about it, for a reader.

A file has blocks: commands, one a line, then `----`, then what they brought about, up to an empty line.

    begin 1
    ----
    ledger: hold round=2 lineage=1: ok
    a <- pause round=2
    ...

`#` begins a comment. Everything that an instant brings about happens before the next command. `NAME` is a
member, or `trainer` for the one that came last. Commands:

    coordinator [KEY=VALUE ...]     a coordinator starts, again on the same ledger after `kill`
    kill                            it dies; all streams break
    member NAME [workers=N] [version=N] [running] [nccl=V] [silent=COMMAND] [fails=COMMAND]
                                    a rollouter connects; in NAME \\s is a space, \\n a line's end, "" no name
    trainer [lineage=N] [snapshot=N] [nccl=V]
                                    a trainer connects, of a new lineage unless one is named
    lineage                         a new trainer is about to come: it has opened its lineage
    hang-up NAME | reconnect NAME | leave NAME
    pod-gone REPLICA                the process of `rollouter-REPLICA-...` is no more, the cluster says
    silence NAME COMMAND ...        it does not answer these
    hang-up-at NAME COMMAND         it hangs up when it hears this
    fail NAME COMMAND [times=N] [moved-on]                      it answers with a failure
    loads-other NAME                it reports another digest than the trainer sent
    proper NAME                     it answers properly again
    answer NAME COMMAND             it gives the proper answer now to the last such command
    begin VERSION [validate]        the trainer asks for a round
    progress NAME TOKENS            tokens that were generated while running work is let finish
    advance SECONDS
    another-term                    another coordinator starts and takes the next term
    expire NAME                     as the queue service does when a lease has ended
    take NAME                       it takes a sample
    validation ROWS                 rows of held-out data are there
    hold-replies OPERATION          the ledger does it, and its replies are kept back from then on
    let-go                          they arrive
    status                          what `headrace status` asks for
    failures                        what headrace_sync_failures_total has counted since the first command
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from headrace.metrics import coordinator as table
from headrace.v1 import sync_pb2 as pb
from tests.fast.coordinator.coordinator_stage import Stage, Staged, StagedMember, StagedTrainer

MARK = "----"


@dataclass
class Block:
    head: list[str]
    """Comments, empty lines and commands, as they stand in the file."""
    output: list[str]

    @property
    def commands(self) -> list[str]:
        return [line for line in self.head if line.strip() and not line.startswith("#")]


def parse(text: str) -> list[Block]:
    blocks, block = [], Block([], [])
    in_output = False
    for line in text.splitlines():
        if line == MARK:
            in_output = True
        elif in_output and line:
            block.output.append(line)
        elif in_output:
            blocks.append(block)
            block, in_output = Block([], []), False
        else:
            block.head.append(line)
    if in_output:
        blocks.append(block)
    else:
        assert not block.commands, f"no {MARK} after {block.commands}"
    return blocks


def render(blocks: list[Block]) -> str:
    return "\n".join("\n".join([*b.head, MARK, *b.output, ""]) for b in blocks)


def play(stage: Stage, blocks: list[Block]) -> list[Block]:
    """The same blocks with what really happened."""
    script = Script(stage)
    played = []
    for block in blocks:
        for line in block.commands:
            script.run(line)
        played.append(Block(block.head, stage.lines[:]))
        stage.lines.clear()
    return played


class Script:
    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.trainer: StagedTrainer | None = None
        self._failures = _sync_failures()

    def run(self, line: str) -> None:
        name, *words = line.split()
        options = {k: yaml.safe_load(v) for k, _, v in (w.partition("=") for w in words if "=" in w)}
        plain = [w for w in words if "=" not in w]
        command: Callable[..., None] = getattr(self, "do_" + name.replace("-", "_"))
        try:
            command(*plain, **options) if name != "coordinator" else command(options)
        except TypeError as error:
            raise AssertionError(f"{line!r}: {error}") from error
        self.stage.settle()

    def peer(self, name: str) -> Staged:
        found = self.trainer if name == "trainer" else self.stage.peers[name]
        assert found is not None, "no trainer yet"
        return found

    # -- who comes and goes ----------------------------------------------------------------------

    def do_coordinator(self, settings: dict[str, Any]) -> None:
        self.stage.start(settings)

    def do_kill(self) -> None:
        self.stage.kill()

    def do_member(
        self, name: str, *flags: str, silent: str = "", fails: str = "", nccl: str = "", **state: int
    ) -> None:
        assert set(flags) <= {"running"}, flags
        real = name.replace("\\s", " ").replace("\\n", "\n").strip('"')
        member = StagedMember(self.stage, real, paused="running" not in flags, nccl=str(nccl), **state)
        while member.label in self.stage.peers:
            member.streams += 1
        self.stage.peers[member.label] = member
        if silent:
            member.silence(silent)
        if fails:
            self._fail(member, fails, times=1)
        self.stage.do(member.connect())

    def do_trainer(self, lineage: int | None = None, snapshot: int = -1, nccl: str = "") -> None:
        if lineage is None:
            lineage = self.stage.ledger.open_lineage()
        trainer = StagedTrainer(self.stage, lineage, snapshot, str(nccl))
        if lineage == self.stage.ledger.model.lineage:  # else a stranger: it is only let in to be refused
            self.trainer = trainer
        self.stage.peers[f"trainer {len(self.stage.peers)}"] = trainer
        self.stage.do(trainer.connect())

    def do_lineage(self) -> None:
        self.stage.say(f"ledger: lineage {self.stage.ledger.open_lineage()} is opened")

    def do_hang_up(self, name: str) -> None:
        self.stage.do(self.peer(name).close())

    def do_reconnect(self, name: str) -> None:
        self.stage.do(self.peer(name).connect())

    def do_leave(self, name: str) -> None:
        self.peer(name).report(leaving=pb.MemberLeaving())

    def do_pod_gone(self, replica: str) -> None:
        self.stage.do(self.stage.driver.reports.replica_gone(replica))

    # -- how they behave -------------------------------------------------------------------------

    def do_silence(self, name: str, *kinds: str) -> None:
        self.peer(name).silence(*kinds)

    def do_hang_up_at(self, name: str, kind: str) -> None:
        self.peer(name).hangs_up_at = kind

    def do_proper(self, name: str) -> None:
        self.peer(name).answers.clear()
        self.peer(name).hangs_up_at = ""

    def do_answer(self, name: str, kind: str) -> None:
        self.peer(name).answer(kind)

    def do_fail(self, name: str, kind: str, *flags: str, times: int = 1000) -> None:
        assert set(flags) <= {"moved-on"}, flags
        self._fail(self.peer(name), kind, times, "moved-on" in flags)

    @staticmethod
    def _fail(peer: Staged, kind: str, times: int, moved_on: bool = False) -> None:
        left = times

        def answer(command: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                return peer.proper(kind, command)
            session = getattr(command, kind).session
            if isinstance(peer, StagedMember):
                return peer.failed(command, session)
            failed = pb.TrainerFailed(
                term=command.term, session=session, error="cannot send", moved_on=moved_on
            )
            return {"failed": failed}

        peer.answers[kind] = answer

    def do_loads_other(self, name: str) -> None:
        member = self.peer(name)
        assert isinstance(member, StagedMember)
        member.answers["load"] = lambda command: member.loaded(command, "another")

    def do_begin(self, version: str, *flags: str) -> None:
        assert set(flags) <= {"validate"}, flags
        trainer = self.peer("trainer")
        assert isinstance(trainer, StagedTrainer)
        trainer.begin(int(version), validate="validate" in flags)

    def do_progress(self, name: str, tokens: str) -> None:
        self.peer(name).report(progress=pb.MemberProgress(tokens=int(tokens), running=1))

    # -- the world -------------------------------------------------------------------------------

    def do_advance(self, seconds: str) -> None:
        self.stage.advance(float(seconds))

    def do_another_term(self) -> None:
        self.stage.say(f"ledger: term {self.stage.ledger.model.open_term().term} is opened")

    def do_expire(self, name: str) -> None:
        self.stage.ledger.expire(name, "its lease has ended")

    def do_take(self, name: str) -> None:
        model = self.stage.ledger.model
        model.issue(len(model.records), [b"prompt"], False, f"issue {len(model.records)}")
        taken = model.take(name, model.version, 1, f"take {len(model.records)}")
        self.stage.say(f"ledger: {name} takes {len(taken.items)} sample")

    def do_validation(self, rows: str) -> None:
        self.stage.ledger.model.val_load([(row, b"row") for row in range(int(rows))])

    def do_hold_replies(self, operation: str) -> None:
        self.stage.ledger.hold_from(operation)

    def do_let_go(self) -> None:
        self.stage.ledger.let_go()

    def do_failures(self) -> None:
        counted = {k: v - self._failures[k] for k, v in _sync_failures().items()}
        self.stage.say("failures: " + " ".join(f"{reason}={count:g}" for reason, count in counted.items()))

    def do_status(self) -> None:
        reply, stats = self.stage.status(), self.stage.ledger.model.stats()
        members = ",".join(f"{m}={v}" for m, v in sorted(stats.members.items()))
        for line in (
            f"status: {reply.phase} version={reply.version} round={reply.round} term={reply.term}",
            f"  trainer {'here' if reply.trainer_connected else 'away'}, waits for "
            f"{','.join(reply.waiting_for) or 'nobody'}",
            f"  members {','.join(reply.members) or '-'}, joiners {','.join(reply.joiners) or '-'}",
            f"  ledger: version={stats.version} held={str(stats.held).lower()} members {members or '-'}",
        ):
            self.stage.say(line)


def _sync_failures() -> dict[str, float]:
    """By reason, of this process."""
    (family,) = table.SYNC_FAILURES.collect()
    return {
        sample.labels["reason"]: sample.value
        for sample in family.samples
        if sample.name.endswith("_total") and sample.labels
    }
