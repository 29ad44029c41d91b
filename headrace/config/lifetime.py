"""Which keys of the configuration hold for how long, as their fields say.

What a resume refuses, what the ledger remembers of a run, what `headrace tune` may change, which changes
replace a pod, and the column of docs/configuration.md all follow from this.
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
    """The field's own lifetime, or that of its section. Raises TypeError for a field with two."""
    found = [mark for mark in field.metadata if isinstance(mark, Lifetime)]
    if len(found) > 1:
        raise TypeError(f"a field has one lifetime, not {' and '.join(mark.name for mark in found)}")
    return found[0] if found else section


def walk(
    model: type[BaseModel], inherited: Lifetime = START, prefix: str = ""
) -> Iterator[tuple[str, Lifetime]]:
    """(dotted key, lifetime) of every key of `model` that holds a value, in its order."""
    for name, field in model.model_fields.items():
        lifetime, inner = of_field(field, inherited), field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from walk(inner, lifetime, f"{prefix}{name}.")
        else:
            yield prefix + name, lifetime


@cache
def by_key() -> Mapping[str, Lifetime]:
    """Of the run's configuration."""
    return MappingProxyType(dict(walk(RunConfig)))


def keys(name: str) -> tuple[str, ...]:
    """The keys with the lifetime `name`, in the order of the configuration."""
    return tuple(key for key, lifetime in by_key().items() if lifetime.name == name)


def in_ledger() -> tuple[str, ...]:
    """The keys whose values the ledger and every checkpoint remember."""
    return tuple(key for key, lifetime in by_key().items() if lifetime.in_ledger)
