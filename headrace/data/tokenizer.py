"""The policy's tokenizer and the chat template for prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from headrace.config.run import RunConfig
from headrace.data.problems import DataError
from headrace.data.procedural import is_procedural
from headrace.data.prompts import Tokenizer
from headrace.data.row_format import DataRow

_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""A tag specific to transformers that marks the model's turns."""


def load_tokenizer(config: RunConfig) -> Tokenizer:
    """Load the tokenizer of the model's directory. `data.chat_template`, if set, replaces its template.

    Imports transformers, which takes seconds. Raises DataError.
    """
    template = None if config.data.chat_template is None else _read_template(config.data.chat_template)
    path = Path(config.model.path)
    if not path.is_dir():
        raise DataError(f"model.path: {path} is no directory; give the one with the tokenizer's files")
    from transformers import AutoTokenizer

    try:
        found: Any = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=config.model.trust_remote_code, local_files_only=True
        )
    except Exception as error:  # a tokenizer's own code may raise anything
        raise DataError(f"model.path: the tokenizer in {path} cannot be loaded: {error}") from error
    if template is not None:
        found.chat_template = template
    # We check lengths ourselves; the tokenizer would warn about each long prompt.
    found.model_max_length = int(1e30)
    return cast(Tokenizer, found)


def need_template(tokenizer: Tokenizer, rows: Sequence[DataRow], config: RunConfig) -> None:
    """Raise one DataError, not one per row, if there are chats but no chat template."""
    problem = None if getattr(tokenizer, "chat_template", None) else _no_template(rows, config)
    if problem is not None:
        raise DataError(problem)


def _no_template(rows: Sequence[DataRow], config: RunConfig) -> str | None:
    """The problem and its remedy if `rows` contain chats, for a model without a template; or None."""
    chat = next((row for row in rows if not isinstance(row.prompt, str)), None)
    if chat is None:
        return None
    hint = ", or add chat=false to it" if is_procedural(chat.file) else ""
    return (
        f"{chat.file}: the prompts are chats, but the tokenizer in {config.model.path} has no chat template: "
        f"set data.chat_template to a file, or write the prompts as text{hint}"
    )


def template_problem(rows: Sequence[DataRow], config: RunConfig) -> str | None:
    """The problem with the chat template, as far as its files show, or None. Needs no tokenizer."""
    data, path = config.data, Path(config.model.path)
    if data.chat_template is not None:
        try:
            _read_template(data.chat_template)
        except DataError as error:
            return str(error)
        return None
    try:
        settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        settings = {}
    brings_one = (isinstance(settings, dict) and settings.get("chat_template")) or any(
        path.glob("*chat_template*")
    )
    unknown = config.model.trust_remote_code or not path.is_dir()
    return None if brings_one or unknown else _no_template(rows, config)


def _read_template(file: str) -> str:
    """Read the template and check its syntax. Raises DataError."""
    where = f"data.chat_template: {file}"
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise DataError(f"{where}: cannot be read: {reason}; give a file with a Jinja template") from None
    import jinja2
    import jinja2.ext

    try:
        environment = jinja2.Environment(extensions=[jinja2.ext.loopcontrols, jinja2.ext.do])
        environment.parse(_GENERATION.sub("", text))
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"{where}:{error.lineno}: no Jinja template: {error.message}; correct it") from None
    return text
