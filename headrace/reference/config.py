"""Write docs/configuration.md from the configuration models: `python -m headrace.reference.config`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from headrace.config.base import START, Lifetime
from headrace.config.lifetime import of_field
from headrace.config.run import RunConfig

TARGET = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"

_HEAD = """# Configuration

One YAML file describes a run; every service reads the same one. `headrace run FILE key.path=value ...`
changes single keys. Unknown keys are refused, and values that do not fit together are refused with the
change that fixes them. `headrace run FILE --dry-run` checks everything and shows the plan. The resolved
configuration is in the run's directory as `config.yaml`.

The column *lifetime* says how long a value holds:

- `run`: for the life of the run. Its ledger and checkpoints are made with it; a resume or an upgrade with
  another value is refused.
- `start`: until the service starts again. A resume, or an upgrade, may change it.
- `live`: until `headrace tune` or an upgrade changes it, while the run is in progress.
- `initial`: the value that the run starts with; `headrace scale` and `kubectl scale` change it afterwards.

Made from the models in `headrace/config/` by `make docs`.
"""


def _rows(
    model: type[BaseModel], prefix: str, inherited: Lifetime
) -> Iterator[tuple[str, FieldInfo, Lifetime]]:
    for name, info in model.model_fields.items():
        inner, lifetime = info.annotation, of_field(info, inherited)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _rows(inner, f"{prefix}{name}.", lifetime)
        else:
            yield f"{prefix}{name}", info, lifetime
            if (entry := _table(inner)) is not None:
                yield from _rows(entry, f"{prefix}{name}.NAME.", lifetime)


def _table(annotation: Any) -> type[BaseModel] | None:
    """Return the section model of a mapping's entries, if any."""
    found = get_args(annotation)[-1] if get_origin(annotation) is dict else None
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None


def _kind(annotation: Any) -> str:
    if _table(annotation) is not None:
        return "sections by name"
    text = getattr(annotation, "__name__", None) if isinstance(annotation, type) else None
    return (text or re.sub(r"\b(typing|headrace(\.[a-z]\w*)+)\.", "", str(annotation))).replace("|", "\\|")


def _limits(info: FieldInfo) -> str:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤", "min_length": "at least"}
    found = [
        f"{sign} {getattr(meta, name)}"
        for meta in info.metadata
        for name, sign in signs.items()
        if getattr(meta, name, None) is not None
    ]
    return ", ".join(found)


def _default(info: FieldInfo) -> str:
    if info.default is PydanticUndefined:
        return "required"
    return f"`{json.dumps(info.default)}`"


_COLUMNS = ["| key | type | default | lifetime | meaning |", "|---|---|---|---|---|"]


def _line(key: str, info: FieldInfo, lifetime: Lifetime) -> str:
    limits = _limits(info)
    kind = _kind(info.annotation) + (f", {limits}" if limits else "")
    meaning = " ".join((info.description or "").split())
    return f"| `{key}` | {kind} | {_default(info)} | {lifetime.name} | {meaning} |"


def render() -> str:
    """Return the whole page."""
    out = [_HEAD]
    plain = []
    for name, info in RunConfig.model_fields.items():
        inner, lifetime = info.annotation, of_field(info, START)
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            plain.append(_line(name, info, lifetime))
            continue
        out += [f"\n## `{name}`\n", (inner.__doc__ or "").strip(), "", *_COLUMNS]
        out += [_line(*row) for row in _rows(inner, f"{name}.", lifetime)]
    out += ["\n## The run itself\n", *_COLUMNS, *plain]
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(render())
    print(f"wrote {TARGET}")
