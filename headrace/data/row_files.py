"""Find the row files that an entry of the configuration names, and read them as plain values.

The content decides the format, not the name: Parquet, JSON lines or a JSON array (both optionally
gzip-compressed), or a directory written by `save_to_disk` of the `datasets` library.

JSON is not read with `datasets`, which infers one schema for all rows: a value of another type then fails
the whole file without saying where, and an absent key looks like null. Parquet is read with `pyarrow`, on
which `datasets` is built. It reads batch by batch, without the copy that `datasets` keeps in the home
directory. Nothing here contacts a hub.
"""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from headrace.data import sources
from headrace.data.problems import InvalidRow, UnreadableFile
from headrace.data.row_format import COLUMNS, PICTURES, REQUIRED

SUFFIXES = (".parquet", ".jsonl", ".json", ".jsonl.gz", ".json.gz")
"""Files that are read in a directory."""

_PARQUET_MAGIC = b"PAR1"
_GZIP_MAGIC = b"\x1f\x8b"
_BATCH = 1024
"""Parquet rows converted to Python values at a time."""


@dataclass(frozen=True)
class Content:
    """The content of a file, read lazily."""

    values: Iterator[tuple[int, Any]]
    """(line or row from 1, its value or an InvalidRow); may raise UnreadableFile."""
    is_row: bool
    """Numbers count rows instead of lines."""


# -- names --------------------------------------------------------------------------------------------


def expand(entry: str) -> list[str]:
    """The files that an entry names: one file, or those of a directory or pattern, sorted by name.

    Raises UnreadableFile if there are none.
    """
    path = Path(entry).expanduser()
    if path.is_dir():
        return _in_directory(path)
    if glob.has_magic(entry) and not path.exists():
        found = sorted(name for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
        if not found:
            raise UnreadableFile("no file matches the pattern; correct it")
        return found
    if not path.exists():
        if "://" in entry:
            raise UnreadableFile("is an address; download it, and name the file")
        name = sources.name_of(path.name)  # an entry of an unknown source has been made a path
        unknown = f", or {sources.DATA_SOURCES.unknown(name)}" if name is not None else ""
        raise UnreadableFile(f"no such file; correct the path{unknown}")
    return [str(path)]


def _in_directory(path: Path) -> list[str]:
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(str(split) for split in path.iterdir() if split.is_dir()))
        raise UnreadableFile(f"holds several splits; name one: {splits}")
    if (path / "dataset_info.json").is_file() and (path / "state.json").is_file():
        return [str(path)]  # save_to_disk: one data set
    found = sorted(
        str(file)
        for file in path.iterdir()
        if file.name.endswith(SUFFIXES) and not file.name.startswith(".") and file.is_file()
    )
    if not found:
        below = sorted({str(file.parent) for suffix in SUFFIXES for file in path.rglob(f"*{suffix}")})
        advice = f"; name one of {', '.join(below[:5])}" if below else ""
        raise UnreadableFile(f"the directory has no {', '.join(SUFFIXES)} file{advice}")
    return found


# -- content ------------------------------------------------------------------------------------------


def open_file(file: str) -> Content:
    """Open a file returned by `expand`. Raises UnreadableFile, here or while the values are read."""
    if Path(file).is_dir():
        return Content(_saved(file), is_row=True)
    try:
        with open(file, "rb") as stream:
            start = stream.read(len(_PARQUET_MAGIC))
        zipped = start.startswith(_GZIP_MAGIC)
        if start == _PARQUET_MAGIC:
            return Content(_parquet(file), is_row=True)
        with _open(file, zipped) as text:
            is_array = _first_character(text) == b"["
    except (OSError, EOFError, zlib.error) as error:
        raise _cannot_be_read(error) from None
    return Content(_array(file, zipped) if is_array else _lines(file, zipped), is_row=is_array)


def _open(file: str, zipped: bool) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(file, "rb")) if zipped else open(file, "rb")


def _first_character(stream: IO[bytes]) -> bytes:
    """The first character that is not white space, or nothing."""
    while block := stream.read(4096):
        text = block.removeprefix(b"\xef\xbb\xbf").strip()
        if text:
            return text[:1]
    return b""


def _cannot_be_read(error: Exception) -> UnreadableFile:
    reason = error.strerror if isinstance(error, OSError) else None
    return UnreadableFile(f"cannot be read: {reason or error}")


def _lines(file: str, zipped: bool) -> Iterator[tuple[int, Any]]:
    """The lines that are not blank. Only \\n ends a line: text may contain U+2028."""
    try:
        with _open(file, zipped) as stream:
            for line, raw in enumerate(stream, start=1):
                if line == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                if line == 1 and raw.strip() == b"{":
                    raise UnreadableFile(
                        "begins like one JSON value over several lines; write JSON lines, one object each, "
                        "or an array of objects"
                    )
                if raw.strip():
                    yield line, _parsed(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise _cannot_be_read(error) from None


def _array(file: str, zipped: bool) -> Iterator[tuple[int, Any]]:
    try:
        with _open(file, zipped) as stream:
            values = _parsed(stream.read().removeprefix(b"\xef\xbb\xbf"))
    except (OSError, EOFError, zlib.error) as error:
        raise _cannot_be_read(error) from None
    if isinstance(values, InvalidRow):
        raise UnreadableFile(f"begins like a JSON array, but {values}")
    yield from enumerate(values, start=1)


def _parsed(raw: bytes) -> Any:
    """The JSON value or an InvalidRow. NaN, infinity and lone surrogates, which UTF-8 lacks, are refused."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return InvalidRow("", f"is not UTF-8 (byte {error.start + 1} of the line)")
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return InvalidRow("", "holds half of a surrogate pair (\\ud800 to \\udfff)")
    except json.JSONDecodeError as error:
        return InvalidRow("", f"is not JSON: {error.msg} (column {error.colno})")
    except (ValueError, RecursionError) as error:
        return InvalidRow("", f"is not JSON that can be read: {error}")
    except InvalidRow as invalid:
        return invalid
    return value


def _no_constant(name: str) -> NoReturn:
    raise InvalidRow("", f"holds {name}, which JSON does not have")


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise InvalidRow("", f"holds {digits}, which is too large for a double")
    return number


def _parquet(file: str) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as opened:
            columns = _columns(opened.schema_arrow.names)
            batches = opened.iter_batches(batch_size=_BATCH, columns=columns)
            yield from _rows_of(batches)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UnreadableFile(f"cannot be read as Parquet: {error}") from None


def _saved(directory: str) -> Iterator[tuple[int, Any]]:
    try:
        import datasets  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise UnreadableFile("was written by save_to_disk: install the package datasets") from None
    try:
        found = datasets.load_from_disk(directory)
        columns = _columns(found.column_names)
        yield from _rows_of(found.select_columns(columns).with_format("arrow").iter(batch_size=_BATCH))
    except (OSError, ValueError) as error:
        raise UnreadableFile(f"cannot be read by the datasets library: {error}") from None


def _columns(names: Collection[str]) -> list[str]:
    """The format's columns among `names`. Raises UnreadableFile if one is missing or must not be ignored."""
    pictures = sorted(set(PICTURES) & set(names))
    if pictures:
        raise UnreadableFile(
            f"has a column {pictures[0]!r}: prompts with pictures are not supported; take the column out if "
            "the prompts are meant without them"
        )
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise UnreadableFile(
            f"has no column {', '.join(missing)} (it has {', '.join(sorted(names)[:20])}): write its rows in "
            "the format that docs/data.md shows"
        )
    return [name for name in COLUMNS if name in names]


def _rows_of(batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    number = 0
    for batch in batches:
        for value in batch.to_pylist():
            number += 1
            yield number, value
