"""Whatever is damaged in the ledger or in the files, `headrace audit` exits with 1 and names it, by id."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from headrace.cli.audit import audit
from headrace.ledger import keys, ops
from headrace.records.checkpoints import complete_checkpoints
from headrace.records.layout import RunLayout
from headrace.records.row_file import read_lines
from headrace.records.trained_log import TrainedPath, follow
from headrace_trainer.distributed.ranks import Ranks
from tests.process.ledger.audited_run import NAME, Killed, Picture, SmallRun, dumped, restore, story

TRIES = 60 if os.environ.get("HEADRACE_HYPOTHESIS") == "thorough" else 3
"""Random places for each kind of damage, in each of two runs."""
P = keys.prefix(NAME)


@dataclass
class Bench:
    """A run, its pictures, and what is true of it."""

    run: SmallRun
    picture: Picture
    earlier: list[dict[bytes, bytes]] = field(default_factory=list)
    """The ledger at moments before."""
    rng: random.Random = field(default_factory=random.Random)

    @property
    def client(self) -> redis.Redis:
        return self.run.ledger.redis

    @property
    def trained(self) -> Path:
        return self.run.layout.trained

    def path(self) -> TrainedPath:
        return follow(read_lines(self.trained))

    def ids(self, *states: str) -> list[str]:
        """Of the samples that the ledger has, in these states or in any."""
        out = []
        for n in range(int(self.client.hget(P + "meta", "issued_total") or 0)):
            state = self.client.hget(f"{P}s:{n:010d}", "state")
            if state is not None and (not states or text(state) in states):
                out.append(f"{n:010d}")
        return out

    def rewrite(self, file: Path, change: Callable[[list[str]], object]) -> None:
        lines = file.read_text().splitlines()
        change(lines)
        file.write_text("".join(line + "\n" for line in lines))

    def manifest(self) -> tuple[Path, dict[str, Any]]:
        file = self.rng.choice(complete_checkpoints(self.run.layout.checkpoints)) / "manifest.json"
        return file, json.loads(file.read_text())


def text(value: bytes | str) -> str:
    assert isinstance(value, bytes)
    return value.decode()


def stream(b: Bench, name: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    return cast(list[tuple[bytes, dict[bytes, bytes]]], b.client.xrange(P + name))


Damage = Callable[[Bench], set[str] | None]
"""Does it, and says what must be named; None where this run has no place for it."""
DAMAGES: dict[str, Damage] = {}


def damage(function: Damage) -> Damage:
    DAMAGES[function.__name__] = function
    return function


# -- the ledger ---------------------------------------------------------------------------------------

STATES = ("ready", "in_flight", "parked", "queued", "training", "trained", "dead", "dropped")
PLACES = {"in_flight": "inflight"} | {
    s: s for s in ("parked", "queued", "training", "trained", "dead", "dropped")
}


@damage
def a_record_is_deleted(b: Bench) -> set[str] | None:
    chosen = b.rng.choice(b.ids())
    b.client.delete(f"{P}s:{chosen}")
    return {chosen}


@damage
def several_records_are_deleted(b: Bench) -> set[str] | None:
    chosen = b.rng.sample(b.ids(), 5)
    b.client.delete(*(f"{P}s:{i}" for i in chosen))
    return set(chosen)


@damage
def the_key_of_a_place_is_deleted(b: Bench) -> set[str] | None:
    state = b.rng.choice(list(PLACES))
    held = b.ids(state)
    b.client.delete(P + PLACES[state])
    return set(held) or None


@damage
def the_meta_key_is_deleted(b: Bench) -> set[str] | None:
    b.client.delete(P + "meta")
    return set(b.path().ids)


@damage
def everything_is_flushed(b: Bench) -> set[str] | None:
    b.client.flushall()
    return set(b.path().ids)


@damage
def a_field_of_the_meta_key_is_deleted(b: Bench) -> set[str] | None:
    name = b.rng.choice([text(k) for k in b.client.hkeys(P + "meta") if b":" not in k and k not in OPTIONAL])
    b.client.hdel(P + "meta", name)
    return {name}


OPTIONAL = (b"scoring", b"ending", b"completed", b"restarted")
"""Come and go with the run."""


@damage
def a_member_leaves_its_place(b: Bench) -> set[str] | None:
    state = b.rng.choice([s for s in PLACES if b.ids(s)])
    chosen, key = b.rng.choice(b.ids(state)), P + PLACES[state]
    (b.client.hdel if b.client.type(key) == b"hash" else b.client.zrem)(key, chosen)
    return {chosen}


@damage
def a_state_is_altered(b: Bench) -> set[str] | None:
    chosen = b.rng.choice(b.ids())
    was = text(b.client.hget(f"{P}s:{chosen}", "state") or b"")
    b.client.hset(f"{P}s:{chosen}", "state", b.rng.choice([s for s in (*STATES, "lost") if s != was]))
    return {chosen}


@damage
def a_trained_sample_goes_back_in_all_places(b: Bench) -> set[str] | None:
    """The ledger agrees with itself; only the files know better."""
    chosen = b.rng.choice(b.path().ids)
    record = f"{P}s:{chosen}"
    if b.client.hget(record, "state") != b"trained":
        return None
    b.client.zrem(P + "trained", chosen)
    b.client.hset(record, mapping={"state": "dropped", "reason": "drop_last"})
    b.client.hset(P + "dropped", chosen, "drop_last")
    return {chosen}


@damage
def a_dead_sample_is_trained_in_all_places(b: Bench) -> set[str] | None:
    if not (there := b.ids("dead", "dropped")):
        return None
    chosen = b.rng.choice(there)
    b.client.hdel(P + "dead", chosen)
    b.client.hdel(P + "dropped", chosen)
    b.client.hset(f"{P}s:{chosen}", mapping={"state": "trained", "step": "1"})
    b.client.zadd(P + "trained", {chosen: 1})
    return {chosen}


@damage
def a_dropped_sample_waits_again_in_all_places(b: Bench) -> set[str] | None:
    """Of a run that has completed: nothing may wait there."""
    if not (there := b.ids("dropped")) or not b.path().starts[-1].ended:
        return None
    chosen = b.rng.choice(there)
    b.client.hdel(P + "dropped", chosen)
    b.client.hset(f"{P}s:{chosen}", "state", "ready")
    b.client.zadd(P + "retries", {chosen: int(chosen)})
    return {chosen}


@damage
def a_step_is_altered(b: Bench) -> set[str] | None:
    chosen = b.rng.choice(b.ids("trained"))
    step = int(b.client.hget(f"{P}s:{chosen}", "step") or 0) + b.rng.choice([-1, 1])
    if b.rng.random() < 0.7:
        b.client.hset(f"{P}s:{chosen}", "step", step)
    if b.rng.random() < 0.7:
        b.client.zadd(P + "trained", {chosen: step})
    if b.rng.random() < 0.3:
        b.client.hdel(f"{P}s:{chosen}", "step")
    known = b.path().step_of.get(chosen)
    now = b.client.hget(f"{P}s:{chosen}", "step"), b.client.zscore(P + "trained", chosen)
    return None if now == (str(known).encode(), float(known or -1)) else {chosen}


@damage
def a_field_of_a_record_is_lost(b: Bench) -> set[str] | None:
    chosen = b.rng.choice(b.ids())
    state = text(b.client.hget(f"{P}s:{chosen}", "state") or b"")
    fields = ["state", "issue", "attempt"]
    fields += {"trained": ["step"], "dead": ["reason", "prompt"], "dropped": ["reason", "prompt"]}.get(
        state, []
    )
    fields += {"queued": ["eid"], "training": ["eid", "window"], "parked": ["work"]}.get(state, [])
    fields += ["owner"] if state == "in_flight" else []
    b.client.hdel(f"{P}s:{chosen}", b.rng.choice(fields))
    return {chosen}


@damage
def the_samples_stream_is_cut(b: Bench) -> set[str] | None:
    entries = stream(b, "samples")
    if not entries:
        return None
    if b.rng.random() < 0.3:
        b.client.delete(P + "samples")
        return {values[b"id"].decode() for _, values in entries}
    b.client.xtrim(P + "samples", maxlen=len(entries) - 1, approximate=False)
    return {entries[0][1][b"id"].decode()}


@damage
def the_prompts_stream_is_cut(b: Bench) -> set[str] | None:
    entries = stream(b, "prompts")
    if not entries:
        return None
    b.client.xtrim(P + "prompts", maxlen=len(entries) - 1, approximate=False)
    return {entries[0][1][b"id"].decode()}


@damage
def an_older_ledger_is_restored(b: Bench) -> set[str] | None:
    must = set(b.path().ids)
    restore(b.client, b.rng.choice(b.earlier))
    lost = must - set(b.ids("trained"))
    return lost or None


@damage
def fewer_were_issued(b: Bench) -> set[str] | None:
    count = b.rng.randint(1, 4)
    issued = int(b.client.hget(P + "meta", "issued_total") or 0)
    gone = [i for i in b.ids() if int(i) >= issued - count]
    b.client.hset(P + "meta", mapping={"issued_total": issued - count, "cursor": issued - count})
    return set(gone)


@damage
def the_version_goes_back(b: Bench) -> set[str] | None:
    version = int(b.client.hget(P + "meta", "version") or 0)
    known = {json.loads(line)["version"] for line in b.run.layout.sync.read_text().splitlines()}
    to = b.rng.randint(-1, max(known) - 1)
    b.client.hset(P + "meta", "version", to)
    return {f"version {v}" for v in known if v > to} if version > to else None


@damage
def the_lineage_goes_back(b: Bench) -> set[str] | None:
    last = b.path().starts[-1].lineage
    b.client.hset(P + "meta", "lineage", last - 1)
    return {f"lineage {last}"}


# -- trained.jsonl ------------------------------------------------------------------------------------


def kept_rows(b: Bench) -> list[int]:
    """Indices of rows that a kill cannot have kept from being there, nor have cut off: not the last row of a
    lineage that was killed."""
    lines = read_lines(b.trained)
    out = []
    for number, line in enumerate(lines):
        follows = lines[number + 1].row if number + 1 < len(lines) else None
        row = line.row or {}
        if "ended_after" in row or (follows is not None and "from_step" not in follows):
            out.append(number)
    return out


def names_of(b: Bench, number: int) -> set[str]:
    """What the row with this index is about."""
    row = read_lines(b.trained)[number].row or {}
    on_path = [s.ids for s in b.path().steps if s.line == number + 1]
    return set(on_path[0]) if on_path else {f"lineage {row.get('lineage')}"}


@damage
def a_row_is_missing(b: Bench) -> set[str] | None:
    number = b.rng.choice(kept_rows(b))
    names = names_of(b, number)
    b.rewrite(b.trained, lambda lines: lines.pop(number))
    return names


@damage
def any_row_before_a_start_is_missing(b: Bench) -> set[str] | None:
    """Also one that no other row and no sample misses: the start has counted them."""
    starts = b.path().starts
    number = b.rng.randrange(starts[-1].line - 1)
    b.rewrite(b.trained, lambda lines: lines.pop(number))
    return {f"lineage {starts[-1].lineage} began after"}


@damage
def the_last_end_is_missing(b: Bench) -> set[str] | None:
    if not b.path().starts[-1].ended:
        return None
    b.rewrite(b.trained, lambda lines: lines.pop())
    return {f"no end of lineage {b.path().starts[-1].lineage}"}


@damage
def a_row_is_there_twice(b: Bench) -> set[str] | None:
    lines = read_lines(b.trained)
    number = b.rng.randrange(len(lines))
    row = lines[number].row or {}
    b.rewrite(b.trained, lambda lines: lines.insert(number, lines[number]))
    return set(row.get("ids", [])) or {f"lineage {row['lineage']}"}


@damage
def a_row_is_garbled(b: Bench) -> set[str] | None:
    number = b.rng.choice(kept_rows(b))
    names = names_of(b, number)

    def garble(lines: list[str]) -> None:
        text = lines[number]
        at = b.rng.randrange(len(text))
        if b.rng.random() < 0.5 and "ended" not in text:  # so a kill leaves it, and nothing is lost
            lines[number] = text[:at]
        else:
            lines[number] = text[:at] + "\x00\x1b[2J{" + text[at + 3 :]

    b.rewrite(b.trained, garble)
    return {f"line {number + 1}"} | (names if all(n.isdigit() for n in names) else set())


@damage
def two_steps_change_places(b: Bench) -> set[str] | None:
    steps = b.path().steps
    pairs = [(s, t) for s, t in pairwise(steps) if t.line == s.line + 1]
    if not pairs:
        return None
    one, other = b.rng.choice(pairs)

    def swap(lines: list[str]) -> None:
        i, j = one.line - 1, other.line - 1
        lines[i], lines[j] = lines[j], lines[i]

    b.rewrite(b.trained, swap)
    return {*one.ids, *other.ids}


@damage
def the_ids_of_a_row_are_altered(b: Bench) -> set[str] | None:
    step = b.rng.choice(b.path().steps)
    chosen, kind = b.rng.choice(step.ids), b.rng.randrange(4)
    other = b.rng.choice([i for i in b.path().ids if i != chosen])
    made_up = "0000009999"
    ids = [i for i in step.ids if i != chosen] + [[], [chosen, made_up], [chosen, other], [made_up]][kind]

    def alter(lines: list[str]) -> None:
        lines[step.line - 1] = json.dumps(json.loads(lines[step.line - 1]) | {"ids": ids})

    b.rewrite(b.trained, alter)
    return [{chosen}, {made_up}, {other}, {chosen, made_up}][kind]


@damage
def the_file_ends_too_early(b: Bench) -> set[str] | None:
    lines = read_lines(b.trained)
    keep = b.rng.randrange(len(lines))
    lost = set(b.path().ids)
    b.rewrite(b.trained, lambda lines: lines.__delitem__(slice(keep, None)))
    lost -= set(b.path().ids)
    return lost or ({"no end of"} if not lines[-1].row or "ended_after" in lines[-1].row else None)


@damage
def the_file_is_gone(b: Bench) -> set[str] | None:
    ids = set(b.path().ids)
    b.trained.unlink()
    return ids


# -- sync.jsonl ---------------------------------------------------------------------------------------


@damage
def a_version_is_missing(b: Bench) -> set[str] | None:
    rows = [json.loads(line)["version"] for line in b.run.layout.sync.read_text().splitlines()]
    # The last row of a lineage that did not end in order may have been lost with it.
    excused = {
        max([v for v in rows if v <= after], default=-1)
        for start, after in zip(b.path().starts, versions_after(b), strict=True)
        if not start.ended
    }
    chosen = b.rng.choice([v for v in rows if v not in excused] or [-1])
    if chosen < 0:
        return None
    b.rewrite(b.run.layout.sync, lambda lines: lines.pop(rows.index(chosen)))
    return {f"version {chosen}"}


def versions_after(b: Bench) -> list[int]:
    """The version committed last by each lineage."""
    starts = b.path().starts
    last = int(b.client.hget(P + "meta", "version") or 0)
    return [s.version or 0 for s in starts[1:]] + [last]


@damage
def a_version_is_there_twice(b: Bench) -> set[str] | None:
    rows = [json.loads(line)["version"] for line in b.run.layout.sync.read_text().splitlines()]
    number = b.rng.randrange(len(rows))
    b.rewrite(b.run.layout.sync, lambda lines: lines.insert(b.rng.randrange(len(lines)), lines[number]))
    return {f"version {rows[number]}"}


@damage
def a_version_too_many(b: Bench) -> set[str] | None:
    version = int(b.client.hget(P + "meta", "version") or 0) + b.rng.randint(1, 9)
    b.rewrite(b.run.layout.sync, lambda lines: lines.append(json.dumps({"version": version})))
    return {f"version {version}"}


@damage
def a_round_is_garbled(b: Bench) -> set[str] | None:
    lines = b.run.layout.sync.read_text().splitlines()
    number = b.rng.randrange(len(lines))
    cut = b.rng.randrange(1, len(lines[number]))
    b.rewrite(b.run.layout.sync, lambda rows: rows.__setitem__(number, rows[number][:cut]))
    return {f"sync.jsonl line {number + 1}"}


# -- checkpoints --------------------------------------------------------------------------------------


@damage
def a_manifest_names_what_nobody_knows(b: Bench) -> set[str] | None:
    file, plain = b.manifest()
    plain["trained"]["0000007777"] = b.rng.randint(1, plain["step"])
    file.write_text(json.dumps(plain))
    return {"0000007777"}


@damage
def a_manifest_has_lost_a_sample(b: Bench) -> set[str] | None:
    file, plain = b.manifest()
    chosen = b.rng.choice(sorted(plain["trained"]))
    del plain["trained"][chosen]
    file.write_text(json.dumps(plain))
    return {chosen}


@damage
def a_manifest_has_another_step(b: Bench) -> set[str] | None:
    file, plain = b.manifest()
    chosen = b.rng.choice(sorted(plain["trained"]))
    plain["trained"][chosen] += 1
    file.write_text(json.dumps(plain))
    return {chosen}


@damage
def a_manifest_is_garbled(b: Bench) -> set[str] | None:
    file, _ = b.manifest()
    text = file.read_text()
    file.write_text(text[: b.rng.randrange(len(text))])
    return {file.parent.name}


@damage
def a_manifest_is_of_a_version_to_come(b: Bench) -> set[str] | None:
    file, plain = b.manifest()
    plain["version"] = 1000 + b.rng.randrange(9)
    file.write_text(json.dumps(plain))
    return {f"version {plain['version']}"}


# -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["completed", "cut off"])
def bench(
    request: pytest.FixtureRequest,
    quick_valkey: redis.Redis,
    ranks: Ranks,
    tmp_path_factory: pytest.TempPathFactory,
) -> Bench:
    """A run of several starts that has completed, and one that was killed with work in every state."""
    folder, rng = tmp_path_factory.mktemp("run"), random.Random(4)
    quick_valkey.flushall()
    run = SmallRun(folder / "run", quick_valkey, ranks, rng)
    earlier: list[dict[bytes, bytes]] = []

    def keep(moment: str) -> None:
        if moment == "row":
            earlier.append(dumped(quick_valkey))

    run.watch = keep
    if request.param == "completed":
        story(run, rng, starts=3)
    else:
        run.train("stop", 4)
        run.kill_at, run.kill_in = "train", 5
        with pytest.raises(Killed):
            run.train("finish", 0)
        run.killed("train", cut=False)
        run.generate(3)
        run.ledger.run(ops.take("a", run.ledger.run(ops.stats()).version, 2))
    run.watch = lambda _: None
    return Bench(run, Picture(run, folder / "picture"), earlier)


def audited(
    b: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool = False
) -> tuple[int, str]:
    at = b.client.connection_pool.connection_kwargs
    monkeypatch.setenv("HEADRACE_REDIS_URL", f"redis://:{at['password']}@{at['host']}:{at['port']}/0")
    code = audit(str(b.run.layout.root), b.run.layout.root.parent, as_json=as_json)
    return code, capsys.readouterr().out


def test_nothing_is_wrong_where_nothing_is_damaged(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.picture.bring_back()
    code, output = audited(bench, monkeypatch, capsys)
    assert (code, "samples trained once each" in output) == (0, True), output


@pytest.mark.parametrize("name", list(DAMAGES))
def test_damage_is_named(
    name: str, bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(TRIES):
        seed = random.randrange(10**9)
        bench.rng = random.Random(seed)
        bench.picture.bring_back()
        must = DAMAGES[name](bench)
        if must is None:
            continue
        code, output = audited(bench, monkeypatch, capsys, as_json=True)
        problems = json.loads(output)["problems"]
        missing = {what for what in must if not any(what in problem for problem in problems)}
        assert (code, missing) == (1, set()), f"seed {seed}: {must} and {problems}"


def test_much_damage_is_counted_and_shown_in_part(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.picture.bring_back()
    ids = bench.path().ids
    bench.client.flushall()
    monkeypatch.setattr("headrace.cli.audit.SHOWN", 10)
    code, output = audited(bench, monkeypatch, capsys)
    lines = output.splitlines()
    assert (code, f"{len(ids) + 1} problems:" in lines) == (1, True), output
    assert f"  ... and {len(ids) - 9} more: headrace audit run --all prints them, --json too" in lines
    assert sum(line.startswith("  0") for line in lines) == 9
    assert "Keep the run's directory as it is" in lines[-1]
    audit(str(bench.run.layout.root), bench.run.layout.root.parent, show_all=True)
    output = capsys.readouterr().out
    assert all(f"  {i}: trained, the ledger has no record of it" in output for i in ids)


def test_a_ledger_whose_files_are_gone(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run that was begun by `headrace run`: its server has nothing to start on."""
    bench.picture.bring_back()
    root = tmp_path / "gone"
    shutil.copytree(bench.run.layout.root, root)
    RunLayout(root).create()
    assert audit(str(root), tmp_path, as_json=True) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert all(f"{i}: trained, the ledger has no record of it" in problems for i in bench.path().ids)
    for file in (root / "trained.jsonl", root / "sync.jsonl"):
        file.unlink()
    shutil.rmtree(root / "checkpoints")
    assert audit(str(root), tmp_path) == 2, "nothing was ever trained"
    assert "holds no ledger; the run never got that far" in capsys.readouterr().err
