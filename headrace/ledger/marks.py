"""What only grows in a ledger, and so shows that Redis lost what it had acknowledged.

Every request tells the server what its sender has seen, and every answer tells the sender what there is
(`lua/_marks.lua`). A ledger that is behind what somebody has seen of it does nothing for that one any more:
it was flushed, an older append-only file was put in its place, or another run has begun under its name. What
was trained on the lost part cannot be undone, so that is final (`EX_BEYOND_REPAIR`) for every service that
sees it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True)
class Marks:
    """The largest values that somebody has seen; those of nobody are the defaults."""

    ledger: str = ""
    """Id of the ledger, made when the run is configured; empty where it is not known yet."""
    version: int = -1
    """Committed policy version."""
    lineage: int = 0
    cursor: int = 0
    """Samples issued."""
    term: int = 0
    """Starts of the coordinator."""
    writes: int = 0
    """Operations that have changed anything. Only a process that lives remembers it: a server with weak
    settings may lose the last of them, and a new lineage mends that."""

    @property
    def begun(self) -> bool:
        """Whether anything was seen that a ledger which was just made does not have."""
        return self.growing != _FIRST

    @property
    def growing(self) -> tuple[int, ...]:
        return (self.version, self.lineage, self.cursor, self.term, self.writes)

    @property
    def lasting(self) -> Marks:
        """What outlives the process."""
        return Marks(self.ledger, self.version, self.lineage, self.cursor, self.term)

    def with_(self, other: Marks) -> Marks:
        """The larger of each."""
        return Marks(other.ledger or self.ledger, *map(max, self.growing, other.growing))

    def text(self) -> str:
        """As the scripts read it."""
        return "/".join([self.ledger, *map(str, self.growing)])


_FIRST = Marks().growing


def read(text: str) -> Marks:
    """Of what a script shows; an empty value is one that the ledger does not have."""
    ledger, *numbers = text.split("/")
    return Marks(ledger, *(int(n) if n else first for n, first in zip(numbers, _FIRST, strict=True)))


def why_refused(run: str, address: str, seen: Marks, found: Marks | None) -> str:
    """What to tell whoever has `seen` a ledger and gets to see `found`; None where there is none any more."""
    where = f"the ledger of the run {run!r} in Redis at {address}"
    if found is not None and found.ledger != seen.ledger and not seen.begun:
        return (
            f"{where} belongs to another run of that name, which was there first; choose another name with "
            "name=..."
        )
    what = "it is not there any more" if found is None else _differences(seen, found)
    if found is not None and found.lasting.with_(seen.lasting) == found.lasting:  # but `writes`
        mend = "Give the same command again: the run goes on from its last checkpoint, or from its start"
    else:
        mend = (
            "Put the newer append-only file back, or name the server that has the run's data, and give the "
            "same command again. Or start a new run with name=...; to begin it with what was trained, give "
            "it the `headrace export` of a checkpoint as model.path"
        )
    return f"{where} went back: {what}. Redis lost writes that it had acknowledged. {mend}."


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
