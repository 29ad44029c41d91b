"""Writes docs/configuration.md from the configuration models: `python -m headrace.config_doc`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from headrace.config import RunConfig

TARGET = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

_HEAD = """# Configuration

One YAML file describes a run; every service reads the same one. `headrace run FILE key.path=value ...`
changes single keys. Unknown keys are refused, and values that do not fit together are refused with the
change that mends them. `headrace run FILE --dry-run` checks everything and shows the plan. The resolved
configuration lies in the run's directory as `config.yaml`.

Made from the models in `headrace/config*.py` by `make docs`.
"""


def _rows(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _rows(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info
            if (entry := _table(inner)) is not None:
                yield from _rows(entry, f"{prefix}{name}.NAME.")


def _table(annotation: Any) -> type[BaseModel] | None:
    """The section that each entry of a mapping is."""
    found = get_args(annotation)[-1] if get_origin(annotation) is dict else None
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None


def _kind(annotation: Any) -> str:
    if _table(annotation) is not None:
        return "sections by name"
    text = getattr(annotation, "__name__", None) if isinstance(annotation, type) else None
    return (text or re.sub(r"\b(typing|headrace\.\w+)\.", "", str(annotation))).replace("|", "\\|")


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


def render() -> str:
    """The whole page."""
    out = [_HEAD]
    for name, info in RunConfig.model_fields.items():
        inner = info.annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            continue
        about = (inner.__doc__ or "").strip()
        out += [f"\n## `{name}`\n", about if about else "", ""]
        out += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key, field in _rows(inner, f"{name}."):
            limits = _limits(field)
            kind = _kind(field.annotation) + (f", {limits}" if limits else "")
            meaning = " ".join((field.description or "").split())
            out.append(f"| `{key}` | {kind} | {_default(field)} | {meaning} |")
    plain = [
        (name, info)
        for name, info in RunConfig.model_fields.items()
        if not (isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel))
    ]
    out += ["\n## The run itself\n", "| key | type | default | meaning |", "|---|---|---|---|"]
    for name, info in plain:
        meaning = " ".join((info.description or "").split())
        out.append(f"| `{name}` | {_kind(info.annotation)} | {_default(info)} | {meaning} |")
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(render())
    print(f"wrote {TARGET}")
