"""Read and check a run's configuration, a YAML file and dotted overrides, with readable errors.

Every problem is one line, `where: key.path: what; what to do`, and all of them are reported at once.
`where` is the file, or `command line` for a key that an override set. Secrets are masked.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from headrace.compat.verl import translation
from headrace.compat.verl.keys import NoEffect
from headrace.config.redis_url import masked
from headrace.config.run import RunConfig
from headrace.system import disk

COMMAND_LINE = "command line"
_MAX_UNKNOWN = 12
_MISSING = object()
_Alike = dict[str, tuple[str, str, Any]]
"""Our key -> (where, verl's key, value) of the latest verl key that must have the same value."""
_OPTIONS = {"data.show": "headrace data CONFIG --show {}"}
"""Command options that look like keys."""


class ConfigError(ValueError):
    """The configuration is invalid. `lines` are complete sentences, one per problem."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = list(lines)
        super().__init__("\n".join(self.lines))


def is_file_name(text: str) -> bool:
    """Whether an override names a further configuration file rather than a key."""
    return "=" not in text and text.endswith((".yaml", ".yml"))


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the configuration in `path` and apply `overrides` in order.

    An override is `key.path=value` (the value is YAML) or the name of another file, whose keys replace
    earlier ones. verl's keys are translated where they mean the same. Raises ConfigError.
    """
    alike: _Alike = {}
    data = _in_our_keys(_read(path), str(path), alike)
    origins: list[tuple[str, str]] = []  # (key, where it was set), the latest first
    for text in overrides:
        if is_file_name(text):
            layer = _in_our_keys(_read(Path(text)), text, alike)
            origins[:0] = [(key, text) for name, value in layer.items() for key in _leaves(str(name), value)]
            _merge(data, layer)
        else:
            origins[:0] = [(key, COMMAND_LINE) for key in _apply(data, text, alike)]

    def where(dotted: str) -> str:
        for key, origin in origins:
            if dotted == key or dotted.startswith(key + ".") or key.startswith(dotted + "."):
                return origin
        return str(path)

    unknown = list(_unknown_keys(data, RunConfig))
    if unknown:
        lines = [
            f"{where(key)}: {key}: unknown key; {_advice(key, _at(data, key))}"
            for key in unknown[:_MAX_UNKNOWN]
        ]
        if len(unknown) > _MAX_UNKNOWN:
            lines.append(f"{path}: and {len(unknown) - _MAX_UNKNOWN} more unknown keys")
        raise ConfigError(lines)
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError([_line(problem, where) for problem in error.errors()]) from None
    unlike = [
        f"{origin}: {key}: {why}"
        for equal_to, (origin, key, value) in alike.items()
        if (why := translation.unlike(key, value, value_at(config, equal_to)))
    ]
    if unlike:
        raise ConfigError(unlike)
    return config


def read_plain(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read the file and apply `key.path=value` overrides, without validation. Raises ConfigError."""
    data = _read(path)
    for text in overrides:
        _set(data, *_parsed(text), COMMAND_LINE)
    return data


def describe(error: ValidationError, where: str = "") -> list[str]:
    """Return the validation errors of a configuration from another source, as sentences."""
    lines = [_line(problem, lambda _: where) for problem in error.errors()]
    return [line.removeprefix(": ") for line in lines]


def write(config: RunConfig, path: Path) -> None:
    """Write the configuration as YAML, with passwords masked. `path` is replaced atomically."""
    text = yaml.safe_dump(config.to_plain(), sort_keys=False, allow_unicode=True)
    partial = path.with_name(path.name + ".partial")
    with disk.writing(path):
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)


def known_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """Return every key that holds a value, as a dotted path."""
    out: list[str] = []
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        out += known_keys(section, f"{prefix}{name}.") if section else [prefix + name]
    return out


def value_at(config: RunConfig, dotted: str) -> Any:
    """Return the value of a dotted key, as plain data with passwords masked."""
    node: Any = config.to_plain()
    for part in dotted.split("."):
        node = node[part]
    return node


def nearest(key: str) -> str | None:
    """Return the known key that `key` was most likely meant to be."""
    known = known_keys()
    parts = key.split(".")
    for start in range(1, len(parts)):  # a known key under sections that do not exist here (verl's nesting)
        if ".".join(parts[start:]) in known:
            return ".".join(parts[start:])
    leaf, section = parts[-1], ".".join(parts[:-1])
    siblings = [k for k in known if k.rpartition(".")[0] == section]
    same_leaf = [k for k in known if k.rpartition(".")[2] == leaf]
    pools: list[tuple[dict[str, str], str, float]] = [
        ({k.rpartition(".")[2]: k for k in siblings}, leaf, 0.6),
        ({k: k for k in same_leaf}, key, 0.0),
        ({k: k for k in known}, key, 0.85),
        ({k.rpartition(".")[2]: k for k in known}, leaf, 0.7),
    ]
    for pool, wanted, cutoff in pools:
        match = difflib.get_close_matches(wanted, list(pool), n=1, cutoff=cutoff)
        if match:
            return pool[match[0]]
    return None


class _Loader(yaml.SafeLoader):
    """Safe YAML that rejects duplicate keys and reads 1e-6 as a number (YAML 1.1 does not)."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if isinstance(key, str | int | float | bool) and key in seen and key != "<<":
            raise yaml.constructor.ConstructorError(None, None, f"{key!r} is set twice", key_node.start_mark)
        if isinstance(key, str | int | float | bool):
            seen.add(key)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _read(path: Path) -> dict[str, Any]:
    """Read a YAML file as plain data."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file; give the path of a YAML configuration"]) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError([f"{path}: cannot be read: {reason}"]) from None
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError([f"{path}{_yaml_problem(error)}"]) from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError([f"{path}: holds a {type(data).__name__}; write key: value lines"])
    return data


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    at = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
    return f"{at}: not readable as YAML: {getattr(error, 'problem', None) or 'bad syntax'}; correct the line"


def _in_our_keys(data: dict[str, Any], where: str, alike: _Alike) -> dict[str, Any]:
    """Return `data` with verl's keys replaced by ours, and extend `alike`.

    Raises ConfigError for keys without a counterpart.
    """
    known = frozenset(known_keys())
    found = list(translation.leaves(data, known))
    if not any(translation.is_foreign(key, value, known) for key, value in found):
        return data
    out: dict[str, Any] = {}
    said: dict[str, tuple[str, Any]] = {}
    lines: list[str] = []
    for key, value in found:
        try:
            ours = _ours(key, value, known, where, alike)
        except translation.NoCounterpart as error:
            lines.append(f"{where}: {key}: {error}")
            continue
        if ours is None:
            continue
        name, ours_value = ours
        if name in said and said[name][1] != ours_value:
            lines.append(f"{where}: {key}: {said[name][0]} means the same and has another value; keep one")
            continue
        said[name] = key, ours_value
        _set(out, name, ours_value, where)
    if lines:
        raise ConfigError(lines)
    return out


def _ours(key: str, value: Any, known: frozenset[str], where: str, alike: _Alike) -> tuple[str, Any] | None:
    """Return our key and value; None if there is nothing to set. Raises NoCounterpart."""
    found = translation.meaning(key)
    if isinstance(found, NoEffect) and found.equal_to:
        alike[found.equal_to] = where, key, value
    if not translation.is_foreign(key, value, known):
        return key, value
    return translation.translate(key, value)


def _parsed(text: str) -> tuple[str, Any]:
    """Parse one `key.path=value`. Hydra's `+key` is read as `key`. Raises ConfigError."""
    key, equals, raw = text.partition("=")
    key = key.strip().lstrip("+")
    if not equals or not key or any(not part for part in key.split(".")):
        raise ConfigError([f"{COMMAND_LINE}: {text!r} is not an override; write key.path=value"])
    try:
        return key, yaml.load(raw, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError([f"{COMMAND_LINE}: {key}{_yaml_problem(error)}"]) from None


def _apply(data: dict[str, Any], text: str, alike: _Alike) -> list[str]:
    """Apply one `key.path=value` to `data`, extend `alike`, and return the keys that it sets."""
    key, value = _parsed(text)
    known = frozenset(known_keys())
    keys = []
    found = list(translation.leaves(_nested(key, value), known))
    if not any(translation.is_foreign(name, inner, known) for name, inner in found):
        found = [(key, value)]  # one of our sections is replaced as a whole
    for name, inner in found:
        try:
            ours = _ours(name, inner, known, COMMAND_LINE, alike)
        except translation.NoCounterpart as error:
            raise ConfigError([f"{COMMAND_LINE}: {name}: {error}"]) from None
        if ours is not None:
            _set(data, *ours, COMMAND_LINE)
            keys.append(ours[0])
    return keys


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def _set(data: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set a dotted key, creating nested sections as needed. Raises ConfigError."""
    node = data
    *sections, leaf = key.split(".")
    for depth, part in enumerate(sections):
        child = node.setdefault(part, {})
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            inner = ".".join(sections[: depth + 1])
            raise ConfigError([f"{where}: {key}: {inner} is a value, not a section; {_advice(key)}"])
        node = child
    node[leaf] = value


def _merge(data: dict[Any, Any], layer: Mapping[Any, Any]) -> None:
    """Merge `layer` into `data`: sections are merged, everything else is replaced."""
    for key, value in layer.items():
        if isinstance(value, Mapping) and isinstance(data.get(key), dict):
            _merge(data[key], value)
        else:
            data[key] = value


def _section(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _unknown_keys(data: Mapping[Any, Any], model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield dotted paths in `data` that are not in the schema. An unknown section yields its leaves."""
    for key, value in data.items():
        dotted = f"{prefix}{key}"
        field = model.model_fields.get(key) if isinstance(key, str) else None
        if field is None:
            yield from _leaves(dotted, value)
            continue
        section = _section(field.annotation)
        if section is not None and isinstance(value, Mapping):
            yield from _unknown_keys(value, section, dotted + ".")


def _leaves(dotted: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(f"{dotted}.{key}", inner)
    else:
        yield dotted


def _at(data: Any, dotted: str) -> Any:
    """Return the value at a dotted key of nested sections; None if there is none."""
    for part in dotted.split("."):
        data = data.get(part) if isinstance(data, Mapping) else None
    return data


def _advice(key: str, value: Any = None) -> str:
    if key in _OPTIONS:
        return f"use `{_OPTIONS[key].format(value if isinstance(value, int) else 'N')}`"
    if translation.section_of_its_own(key, frozenset(known_keys())):
        return "it is about how verl itself runs; leave it out"
    close = nearest(key)
    if close:
        return f"did you mean {close}?"
    section = key.rpartition(".")[0]
    siblings = [k for k in known_keys() if k.rpartition(".")[0] == section]
    return f"known there: {', '.join(siblings)}" if siblings else "remove it"


def _line(problem: Any, where: Any) -> str:
    """Format one pydantic error as a sentence."""
    dotted = ".".join(str(part) for part in problem["loc"])
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not dotted:  # a check over several keys: its message names them and the fix
        return f"{where('')}: {message}"
    head = f"{where(dotted)}: {dotted}: "
    if problem["type"] == "missing":
        return head + "not set, but it has no default; add it"
    value = problem.get("input", _MISSING)
    if dotted == "redis.url" and isinstance(value, str):
        value = masked(value)
    shown = repr(value)
    what = f"{shown if len(shown) <= 80 else shown[:77] + '...'} is not possible"
    return head + f"{what}; {_remedy(problem['type'], message, dotted)}"


def _remedy(kind: str, message: str, dotted: str) -> str:
    if kind == "string_pattern_mismatch" and dotted == "name":
        return "use up to 63 letters, digits, '.', '_' and '-', beginning with a letter or digit"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return "write a section with keys below it"
    if kind == "extra_forbidden":  # in a section named by the user
        return "there is no such key"
    if kind == "string_type":
        return "write a text, in quotes where YAML would read something else"
    if kind == "too_short":
        return "name at least one"
    if kind.startswith(("greater_than", "less_than")):
        return message.replace("Input should be", "set it to a value")
    if message.startswith("Input should be"):
        return message.replace("Input should be", "set it to").partition(", unable to")[0]
    return message
