"""Write docs/cli.md from the commands' parsers: `python -m headrace.reference.cli`.

A command's module may define `EXIT_CODES` (code -> meaning), in addition to those of all commands, and `JSON`
(key -> meaning) for the output of `--json`.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

from headrace.cli.main import COMMANDS, parser

TARGET = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
_COLUMNS = "100"

_HEAD = """# Commands

Made from the commands by `make docs`. `headrace COMMAND --help` prints the same.

| command | |
|---|---|
"""
_EXITS = """
## Exit codes

| code | meaning |
|---|---|
| 0 | done |
| 1 | the run failed, or what was asked for could not be done; the last lines say why |
| 2 | the command line, the configuration or its surroundings are at fault; nothing was started |
| 130 | stopped by Ctrl-C or SIGTERM; a run can be resumed with the same command |

Services have their own, which the runner and Kubernetes act on: 69 Redis cannot be reached; 75 the trainer
stopped in order and can be resumed; 78 the service's configuration or data cannot be used.

## JSON

Commands with `--json` print one JSON value on standard output and nothing else there; messages go to standard
error. Keys may be added; those that are here keep their meaning.

## Completion

`headrace completion bash|zsh|fish` prints what the shell needs to complete commands, options, files and the
names of runs. For bash, put this into `~/.bashrc`:

```text
eval "$(headrace completion bash)"
```

For zsh write it to a file `_headrace` in a directory of `$fpath`, for fish to
`~/.config/fish/completions/headrace.fish`.
"""


def render() -> str:
    """Return the whole page."""
    with mock.patch.dict(os.environ, COLUMNS=_COLUMNS):
        return "".join(_page())


def _page() -> Iterator[str]:
    yield _HEAD
    for name, line in COMMANDS.items():
        yield f"| [`headrace {name}`](#headrace-{name}) | {line} |\n"
    yield _EXITS
    for name, command in subcommands(parser()).items():
        module = importlib.import_module(f"headrace.cli.{name.replace('-', '_')}")
        yield f"\n## headrace {name}\n\n```text\n{command.format_help().rstrip()}\n```\n"
        yield _table("exit code", {str(c): m for c, m in getattr(module, "EXIT_CODES", {}).items()})
        yield _table("key of the JSON", {f"`{k}`": m for k, m in getattr(module, "JSON", {}).items()})


def subcommands(top: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    raise ValueError("the parser has no commands")


def _table(head: str, rows: Mapping[str, str]) -> str:
    if not rows:
        return ""
    body = "".join(f"| {key} | {meaning} |\n" for key, meaning in rows.items())
    return f"\n| {head} | meaning |\n|---|---|\n{body}"


if __name__ == "__main__":
    TARGET.write_text(render())
    print(f"wrote {TARGET}")
