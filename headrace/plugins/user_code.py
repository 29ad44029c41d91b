"""The one loader of users' code: a Python file by its path, or an importable module by its dotted name.

Standard library only: the processes that run users' functions import this.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import threading
from pathlib import Path
from types import ModuleType

_lock = threading.RLock()  # a file may load another


class UserCodeError(ValueError):
    """A user's file or module is not there, or raised while it was imported. `str` says which and what to
    do, and begins with the path that was given; the exception of the import is its cause."""


def load_user(path: str) -> ModuleType:
    """Import `path`: a `.py` file, or a dotted module name. Raises UserCodeError.

    A file is one module for the life of the process, however its path is written, and two files are two
    modules even when their names are the same. A failed import leaves nothing in `sys.modules`, so that it
    may be tried again. The file's directory is not put on `sys.path`: what stands beside a file is imported
    as from any other program, by way of PYTHONPATH or an installed package.
    """
    with _lock:
        return _file(path) if path.endswith(".py") else _module(path)


def _file(path: str) -> ModuleType:
    file = Path(path).resolve()
    if not file.is_file():
        raise UserCodeError(f"{path} does not exist; give an existing .py file or the name of a module")
    name = f"headrace_user_{file.stem}_{hashlib.sha256(os.fsencode(file)).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None  # the suffix is .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look for it there
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        raise _failure(path, error) from error
    return module


def _module(path: str) -> ModuleType:
    before = set(sys.modules)
    try:
        return importlib.import_module(path)
    except BaseException as error:
        # Python forgets the module that failed, but not what a package had imported of itself by then.
        for name in [n for n in sys.modules if n.startswith(path + ".") and n not in before]:
            del sys.modules[name]
        raise _failure(path, error) from error


def _failure(path: str, error: BaseException) -> BaseException:
    if not isinstance(error, Exception | SystemExit):
        return error  # Ctrl-C is no fault of the file's
    if isinstance(error, ModuleNotFoundError) and _is_absent(path, error.name):
        return UserCodeError(f"{path} does not import: {error!r}; install it or give a .py file")
    return UserCodeError(f"{path} does not import: {error!r}{_line(error, path)}")


def _is_absent(path: str, missing: str | None) -> bool:
    """Whether what is missing is `path` itself, rather than something that it imports."""
    return missing is not None and (path == missing or path.startswith(missing + "."))


def _line(error: BaseException, path: str) -> str:
    """Where in the user's file the import failed."""
    trace, found = error.__traceback__, ""
    while trace is not None:
        if os.path.realpath(trace.tb_frame.f_code.co_filename) == os.path.realpath(path):
            found = f" (line {trace.tb_lineno})"
        trace = trace.tb_next
    return found
