"""Print docs/ledger.md from the transition table. `make docs` writes the file."""

from __future__ import annotations

import ast
import inspect
import sys

from headrace.ledger import states
from headrace.ledger.states import OUTSTANDING, TRANSITIONS, State


def _state_texts() -> dict[str, str]:
    """Return the docstring under each member of `State`."""
    body = ast.parse(inspect.getsource(State)).body[0]
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for member, text in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(member, ast.Assign)
            and isinstance(member.value, ast.Constant)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            texts[str(member.value.value)] = " ".join(str(text.value.value).split())
    return texts


def render() -> str:
    texts = _state_texts()
    lines = [
        "# The ledger",
        "",
        "Generated from `headrace/ledger/states.py` by `python -m headrace.reference.ledger`; do not edit.",
        "",
        inspect.cleandoc(states.__doc__ or ""),
        "",
        "## States",
        "",
        "| state | holds credit | meaning |",
        "|---|---|---|",
    ]
    lines += [f"| `{s}` | {'yes' if s in OUTSTANDING else 'no'} | {texts[s]} |" for s in State]
    lines += [
        "",
        "A `trained` sample counts at the gate until a commit closes its window (`trained_since_sync`).",
        "",
        "## Transitions",
        "",
        "Each row is done by one Lua script, which checks the guard before its first write. Whatever is not "
        "in the table is refused. Before that it checks its arguments (types, ranges, number, form of ids) "
        "and answers those that no service sends with an error, having written nothing.",
        "",
        "| event | from | to | guard |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{t.event}` | {f'`{t.source}`' if t.source else 'new'} | `{t.target}` | {t.guard} |"
        for t in TRANSITIONS
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render())
