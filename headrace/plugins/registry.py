"""One idiom for everything that is chosen by name: what comes along, what users register, what is installed.

An installed package adds a name with an entry point: the group is the registry's, the name is the one that
the configuration uses, the object is what the registry holds. Names of entry points are known without
importing anything, so that a process without torch can tell a wrong name from a right one; the object is
imported when it is asked for.

Invariants: a name means one implementation for the life of the process, and none can be replaced; an unknown
name is an error that says which names exist, the most similar first.

Standard library only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from difflib import SequenceMatcher
from importlib import metadata
from typing import Any, Generic, TypeVar

from headrace.plugins.user_code import UserCodeError, load_user

T = TypeVar("T")


class Registry(Generic[T]):
    def __init__(
        self,
        seam: str,
        shipped: Mapping[str, T | str] | None = None,
        *,
        group: str | None = None,
        modules: Iterable[str] = (),
        convert: Callable[..., T] | None = None,
    ) -> None:
        """`seam`: what is registered, for messages. `shipped`: what comes along, each an object or
        `module:attribute`, imported when asked for. `group`: of entry points. `modules`: imported before the
        first lookup, they register what they have. `convert`: makes an entry of what was registered or
        found, with the keywords of `register`; raises ValueError or TypeError."""
        self.seam = seam
        self.group = group
        self._shipped = dict(shipped or {})
        self._modules = tuple(modules)
        self._convert = convert
        self._entries: dict[str, T] = {}
        self._plugins: dict[str, T] = {}

    def register(self, name: str, **facts: Any) -> Callable[[Any], Any]:
        """Decorator that returns what it is given. A name that is taken raises ValueError."""

        def decorate(entry: Any) -> Any:
            if name in self._entries or name in self._shipped:
                raise ValueError(f"{self.seam} {name!r} is registered already; choose another name")
            self._entries[name] = self._converted(entry, **facts)
            return entry

        return decorate

    def get(self, name: str) -> T:
        """Raises ValueError for an unknown name, UserCodeError (one too) for a plugin that does not load."""
        self._import_modules()
        if name not in self._entries and name in self._shipped:
            self._entries[name] = self._converted(imported(self._shipped[name]))
        if name in self._entries:
            return self._entries[name]
        if name not in self._plugins:
            if (point := self._entry_points().get(name)) is None:
                raise ValueError(self.unknown(name))
            self._plugins[name] = self._plugin(point)
        return self._plugins[name]

    def loaded(self, name: str) -> T | None:
        """What `get` returns where that needs no import: None for an unknown name, and for a plugin or a
        `module:attribute` that was not asked for yet."""
        shipped = self._shipped.get(name)
        if shipped is not None and not isinstance(shipped, str):
            return shipped
        return self._entries.get(name, self._plugins.get(name))

    def having(self, fact: Callable[[T], bool]) -> list[str]:
        """Names of what is loaded and has a property."""
        found = {name: self.loaded(name) for name in self.names()}
        return [name for name, entry in found.items() if entry is not None and fact(entry)]

    def names(self) -> list[str]:
        self._import_modules()
        return sorted({*self._entries, *self._shipped, *self._entry_points()})

    def knows(self, name: str) -> bool:
        """Whether `get` finds it; nothing of a plugin is imported."""
        self._import_modules()
        return name in self._entries or name in self._shipped or name in self._entry_points()

    def checked(self, name: str) -> str:
        """`name`, for a field of the configuration. Raises ValueError for an unknown one."""
        if not self.knows(name):
            raise ValueError(self.unknown(name))
        return name

    def unknown(self, name: str) -> str:
        known = sorted(self.names(), key=lambda n: (-SequenceMatcher(None, name, n).ratio(), n))
        group = f"; a package adds its own with an entry point in {self.group}" if self.group else ""
        return f"unknown {self.seam} {name!r}; known, nearest first: {', '.join(known) or 'none'}{group}"

    def origin(self, name: str) -> str:
        """Which package it comes from, for logs: `headrace`, `NAME VERSION`, or `user code`."""
        if name in self._shipped:
            return "headrace"
        point = self._entry_points().get(name)
        if point is None or point.dist is None:
            return "user code"
        return f"{point.dist.name} {point.dist.version}"

    def reference(self, name: str) -> str | None:
        """`module:attribute` of what is imported when asked for, for another process; None for the rest."""
        shipped = self._shipped.get(name)
        if isinstance(shipped, str):
            return shipped
        point = self._entry_points().get(name)
        return point.value if point is not None else None

    def _converted(self, entry: Any, **facts: Any) -> T:
        if self._convert is not None:
            return self._convert(entry, **facts)
        if facts:
            raise TypeError(f"a {self.seam} is registered by its name alone, got {', '.join(facts)}")
        found: T = entry
        return found

    def _entry_points(self) -> dict[str, metadata.EntryPoint]:
        if self.group is None:
            return {}
        return {point.name: point for point in metadata.entry_points(group=self.group)}

    def _plugin(self, point: metadata.EntryPoint) -> T:
        where = f"{self.seam} {point.name!r} ({self.origin(point.name)}, {point.value})"
        try:
            return self._converted(imported(point.value))
        except UserCodeError as error:
            raise UserCodeError(f"{where}: {error}") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise UserCodeError(f"{where} cannot be used: {error}") from error

    def _import_modules(self) -> None:
        modules, self._modules = self._modules, ()
        for module in modules:
            importlib.import_module(module)


def imported(entry: Any) -> Any:
    """An object itself, or what `module:attribute` names. Raises UserCodeError or AttributeError."""
    if not isinstance(entry, str):
        return entry
    module, _, attribute = entry.partition(":")
    found: Any = load_user(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found
