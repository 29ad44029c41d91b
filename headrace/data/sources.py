"""Named data sources: entries `NAME:REST` of `data.train_files` or `data.val_files`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from headrace.data.problems import UnreadableFile
from headrace.plugins.registry import Registry

DATA_SOURCES: Registry[Callable[[str], Iterator[tuple[int, Any]]]] = Registry(
    "data source", {"reasoning_gym": "headrace.data.procedural:values"}, group="headrace.data_sources"
)
"""Functions from the whole entry to (number from 1, row as in a file). Rows must be a pure function of the
entry on every machine, because a resumed run reads them again. Raise UnreadableFile that says what to do."""

_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]+):(?!//)")


def name_of(entry: str) -> str | None:
    """The part before the colon if it could be a source's name, or None."""
    found = _NAME.match(entry)
    return found[1] if found else None


def is_source(entry: str) -> bool:
    """Whether a data source, rather than a file, provides the rows of an entry."""
    name = name_of(entry)
    return name is not None and DATA_SOURCES.knows(name)


def values(entry: str) -> Iterator[tuple[int, Any]]:
    """Rows of an entry that `is_source`. Raises UnreadableFile."""
    name = name_of(entry)
    assert name is not None
    try:
        yield from DATA_SOURCES.get(name)(entry)
    except UnreadableFile:
        raise
    except Exception as error:  # a package's code may raise anything
        raise UnreadableFile(
            f"data source {name} raised {error!r}; correct the entry or the package"
        ) from error
