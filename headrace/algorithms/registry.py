"""Named implementations of one seam, and how code outside the project adds its own.

Invariants: a name means one implementation for the life of the process; an unknown name is an error that
says which names exist, the most similar first.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from difflib import SequenceMatcher
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """`seam`: what is registered, for messages. `builtin`: modules imported before the first lookup."""

    def __init__(self, seam: str, builtin: Iterable[str] = ()) -> None:
        self.seam = seam
        self._builtin = tuple(builtin)
        self._loaded = False
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator. A name that is taken raises ValueError."""

        def decorate(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.seam} {name!r} is registered already; choose another name")
            self._entries[name] = entry
            return entry

        return decorate

    def get(self, name: str) -> T:
        self._load_builtin()
        try:
            return self._entries[name]
        except KeyError:
            known = sorted(self._entries, key=lambda n: (-SequenceMatcher(None, name, n).ratio(), n))
            raise ValueError(
                f"unknown {self.seam} {name!r}; known, nearest first: {', '.join(known) or 'none'}. "
                "Your own need their module loaded first (a module path or a .py file)."
            ) from None

    def names(self) -> list[str]:
        self._load_builtin()
        return sorted(self._entries)

    def _load_builtin(self) -> None:
        if not self._loaded:
            self._loaded = True
            for module in self._builtin:
                importlib.import_module(module)


def load_module(path: str) -> ModuleType:
    """Import `path`, a dotted module or a .py file, so that what it registers can be found by name.

    Loading the same file again returns the module that is there. Raises ValueError when there is no such
    module; an error inside the module passes through.
    """
    if not path.endswith(".py"):
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not (path == error.name or path.startswith(error.name + ".")):
                raise
            raise ValueError(
                f"no module {path!r} on the Python path; give a .py file or install it"
            ) from error
    file = Path(path).resolve()
    if not file.is_file():
        raise ValueError(f"no file {file}; give a dotted module or an existing .py file")
    name = f"headrace_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} cannot be imported as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:  # whatever the file raises is raised on; a half-made module must not stay behind
        del sys.modules[name]
        raise
    return module
