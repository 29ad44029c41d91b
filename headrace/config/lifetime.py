"""The lifetimes of the configuration's keys, as their fields declare them.

They determine what a resume refuses, what the ledger records of a run, what `headrace tune` may change, which
changes replace a pod, and a column of docs/configuration.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headrace.config.base import START, Lifetime
from headrace.config.run import RunConfig


def of_field(field: FieldInfo, section: Lifetime) -> Lifetime:
    """Return the field's lifetime, or else its section's. Raises TypeError if the field has two."""
    found = [mark for mark in field.metadata if isinstance(mark, Lifetime)]
    if len(found) > 1:
        raise TypeError(f"a field has one lifetime, not {' and '.join(mark.name for mark in found)}")
    return found[0] if found else section


def walk(
    model: type[BaseModel], inherited: Lifetime = START, prefix: str = ""
) -> Iterator[tuple[str, Lifetime]]:
    """Yield (dotted key, lifetime) for every key of `model` that holds a value, in order."""
    for name, field in model.model_fields.items():
        lifetime, inner = of_field(field, inherited), field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from walk(inner, lifetime, f"{prefix}{name}.")
        else:
            yield prefix + name, lifetime


@cache
def by_key() -> Mapping[str, Lifetime]:
    """Return the lifetime of every key of the run's configuration."""
    return MappingProxyType(dict(walk(RunConfig)))


def keys(name: str) -> tuple[str, ...]:
    """Return the keys with the lifetime `name`, in configuration order."""
    return tuple(key for key, lifetime in by_key().items() if lifetime.name == name)


def in_ledger() -> tuple[str, ...]:
    """Return the keys whose values the ledger and every checkpoint record."""
    return tuple(key for key, lifetime in by_key().items() if lifetime.in_ledger)
