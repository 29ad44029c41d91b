"""Values of a ledger that only grow, and so reveal that Redis lost acknowledged writes.

Every request carries the marks that its sender has seen, and every answer carries the current ones
(`lua/_marks.lua`). A ledger that is behind a client's marks refuses that client: it was flushed, an older
append-only file was restored, or another run began under its name. Training on the lost part cannot be
undone, so the refusal is final (`EX_BEYOND_REPAIR`) for every service that sees it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True)
class Marks:
    """The largest values seen by one process. The defaults mean that nothing was seen yet."""

    ledger: str = ""
    """Id of the ledger, created when the run is configured; empty while unknown."""
    version: int = -1
    """Committed policy version."""
    lineage: int = 0
    cursor: int = 0
    """Samples issued."""
    term: int = 0
    """Starts of the coordinator."""
    writes: int = 0
    """Operations that changed anything. Kept in memory only: a server with weak durability may lose the
    last few, and a new lineage recovers from that."""

    @property
    def begun(self) -> bool:
        """Whether anything was seen that a newly created ledger does not have."""
        return self.growing != _FIRST

    @property
    def growing(self) -> tuple[int, ...]:
        return (self.version, self.lineage, self.cursor, self.term, self.writes)

    @property
    def lasting(self) -> Marks:
        """The marks that are saved across starts: all but `writes`."""
        return Marks(self.ledger, self.version, self.lineage, self.cursor, self.term)

    def with_(self, other: Marks) -> Marks:
        """Merge: the larger value of each mark, and `other`'s ledger id if it has one."""
        return Marks(other.ledger or self.ledger, *map(max, self.growing, other.growing))

    def text(self) -> str:
        """The form that the scripts read."""
        return "/".join([self.ledger, *map(str, self.growing)])


_FIRST = Marks().growing


def read(text: str) -> Marks:
    """Parse the marks that a script returned. An empty value is one that the ledger does not have."""
    ledger, *numbers = text.split("/")
    return Marks(ledger, *(int(n) if n else first for n, first in zip(numbers, _FIRST, strict=True)))


def why_refused(run: str, address: str, seen: Marks, found: Marks | None) -> str:
    """The error message for a client that has `seen` more than it `found`; None: the ledger is gone."""
    where = f"the ledger of the run {run!r} in Redis at {address}"
    if found is not None and found.ledger != seen.ledger and not seen.begun:
        return (
            f"{where} belongs to another run of that name, which was there first; choose another name with "
            "name=..."
        )
    what = "it no longer exists" if found is None else _differences(seen, found)
    if found is not None and found.lasting.with_(seen.lasting) == found.lasting:  # only `writes` is behind
        fix = "Give the same command again: the run resumes from its last checkpoint, or from its start"
    else:
        fix = (
            "Put the newer append-only file back, or name the server that has the run's data, and give the "
            "same command again. Or start a new run with name=...; to begin it with what was trained, give "
            "it the `headrace export` of a checkpoint as model.path"
        )
    return f"{where} went back: {what}. Redis lost writes that it had acknowledged. {fix}."


def _differences(seen: Marks, found: Marks) -> str:
    names = {"version": "policy version", "cursor": "samples issued", "term": "coordinator's term"}
    out = (
        []
        if seen.ledger in ("", found.ledger)
        else [f"its id was {seen.ledger} and is {found.ledger or 'none'}"]
    )
    before, now = asdict(seen), asdict(found)
    for f in fields(Marks)[1:]:
        if now[f.name] < before[f.name]:
            out.append(f"{names.get(f.name, f.name)} {before[f.name]} -> {now[f.name]}")
    return ", ".join(out)
