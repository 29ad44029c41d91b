"""A registry for everything chosen by name: built in, registered by users, or from installed packages.

An installed package adds a name with an entry point. Its group is the registry's, its name is the one that
the configuration uses, and its object is the registry's entry. Entry point names are known without an import,
so a process without torch can validate a name. The object is imported on first use.

Invariants: a name means one implementation for the life of the process and cannot be replaced. An unknown
name is an error that lists the existing names, the most similar first.

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
        """Create a registry.

        `seam`: the kind of entry, for messages. `shipped`: the built-in entries, each an object or a
        `module:attribute` that is imported on first use. `group`: the entry point group. `modules`: modules
        that register entries, imported before the first lookup. `convert`: turns a registered or imported
        object into an entry, given the keywords of `register`; raises ValueError or TypeError.
        """
        self.seam = seam
        self.group = group
        self._shipped = dict(shipped or {})
        self._modules = tuple(modules)
        self._convert = convert
        self._entries: dict[str, T] = {}
        self._plugins: dict[str, T] = {}

    def register(self, name: str, **facts: Any) -> Callable[[Any], Any]:
        """Decorator that registers an object and returns it. Raises ValueError if the name is taken."""

        def decorate(entry: Any) -> Any:
            if name in self._entries or name in self._shipped:
                raise ValueError(f"{self.seam} {name!r} is registered already; choose another name")
            self._entries[name] = self._converted(entry, **facts)
            return entry

        return decorate

    def get(self, name: str) -> T:
        """Raises ValueError for an unknown name, or UserCodeError (a subclass) if a plugin fails to load."""
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
        """Like `get`, but never imports.

        None for an unknown name, and for a plugin or `module:attribute` that has not been used yet.
        """
        shipped = self._shipped.get(name)
        if shipped is not None and not isinstance(shipped, str):
            return shipped
        return self._entries.get(name, self._plugins.get(name))

    def having(self, fact: Callable[[T], bool]) -> list[str]:
        """Return the names of the loaded entries for which `fact` is true."""
        found = {name: self.loaded(name) for name in self.names()}
        return [name for name, entry in found.items() if entry is not None and fact(entry)]

    def names(self) -> list[str]:
        self._import_modules()
        return sorted({*self._entries, *self._shipped, *self._entry_points()})

    def knows(self, name: str) -> bool:
        """Whether `get` knows the name. No plugin is imported."""
        self._import_modules()
        return name in self._entries or name in self._shipped or name in self._entry_points()

    def checked(self, name: str) -> str:
        """Return `name`; a validator for configuration fields. Raises ValueError if it is unknown."""
        if not self.knows(name):
            raise ValueError(self.unknown(name))
        return name

    def unknown(self, name: str) -> str:
        known = sorted(self.names(), key=lambda n: (-SequenceMatcher(None, name, n).ratio(), n))
        group = f"; a package adds its own with an entry point in {self.group}" if self.group else ""
        return f"unknown {self.seam} {name!r}; known, nearest first: {', '.join(known) or 'none'}{group}"

    def origin(self, name: str) -> str:
        """Return where an entry comes from, for logs: `headrace`, `NAME VERSION` or `user code`."""
        if name in self._shipped:
            return "headrace"
        point = self._entry_points().get(name)
        if point is None or point.dist is None:
            return "user code"
        return f"{point.dist.name} {point.dist.version}"

    def reference(self, name: str) -> str | None:
        """Return the `module:attribute` of a lazily imported entry, for another process; None for others."""
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
    """Return `entry`, or the object if it is a `module:attribute`. Raises UserCodeError or AttributeError."""
    if not isinstance(entry, str):
        return entry
    module, _, attribute = entry.partition(":")
    found: Any = load_user(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found
