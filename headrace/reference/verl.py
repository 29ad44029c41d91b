"""Write the tables of docs/from-verl.md from the code that reads the keys. `make docs` runs it."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from headrace.compat.verl.keys import DIFFERENT_DEFAULTS, KEYS, NoEffect, Refused, Same

TARGET = Path(__file__).resolve().parents[2] / "docs" / "from-verl.md"
START, END = "<!-- made from headrace/compat/verl/keys.py: begin -->", "<!-- end -->"


def tables() -> str:
    """Return the text between the markers."""
    same = [f"`{key}`" for key, found in KEYS.items() if found == Same(key)]
    renamed = [
        f"| `{key}` | `{found.key}` | {found.note} |"
        for key, found in KEYS.items()
        if isinstance(found, Same) and found != Same(key)
    ]
    no_effect = [
        f"| `{key}` | {_values(found)} | {found.because} | {found.otherwise} |"
        for key, found in KEYS.items()
        if isinstance(found, NoEffect)
    ]
    refused = [f"| `{key}` | {found.advice} |" for key, found in KEYS.items() if isinstance(found, Refused)]
    defaults = [f"| `{key}` | `{json.dumps(value)}` |" for key, value in sorted(DIFFERENT_DEFAULTS.items())]
    return "\n".join(
        [
            "### The same name and meaning",
            "",
            textwrap.fill(", ".join(same) + ".", 116, break_long_words=False, break_on_hyphens=False),
            "",
            "### The same meaning under another name",
            "",
            "| verl | here | |",
            "|---|---|---|",
            *renamed,
            "",
            "### Accepted, with nothing to set",
            "",
            "| verl | values | because | for other values |",
            "|---|---|---|---|",
            *no_effect,
            "",
            "### Refused",
            "",
            "| verl | what to do |",
            "|---|---|",
            *refused,
            "",
            "### Defaults that differ",
            "",
            "`headrace convert-config` writes these out where verl's file does not set them, "
            "`sync.transport` with\n`trainer.device: cuda`.",
            "",
            "| here | verl's default |",
            "|---|---|",
            *defaults,
        ]
    )


def _values(found: NoEffect) -> str:
    if found.equal_to:
        return f"that of `{found.equal_to}`"
    if found.values is None:
        return "any"
    return ", ".join(f"`{json.dumps(value)}`" for value in found.values)


def render(page: str) -> str:
    """Return `page` with the current tables."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
    TARGET.write_text(render(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {TARGET}")
