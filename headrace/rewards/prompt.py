"""Passes the prompt to rewards that read it along with the response."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.data.rows import DataRow


def with_prompt(row: DataRow) -> dict[str, Any]:
    """The row's `extra_info` plus its `prompt`: text, or a list of chat messages."""
    prompt = row.prompt
    if not isinstance(prompt, str):
        return {**row.extra_info, "prompt": [{"role": m.role, "content": m.content} for m in prompt]}
    return {**row.extra_info, "prompt": prompt}
