"""The only loader of user code: a Python file by path, or an importable module by dotted name.

Standard library only, because the processes that run user functions import this.
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

_lock = threading.RLock()  # reentrant: a file may load another


class UserCodeError(ValueError):
    """A user's file or module is missing, or raised an exception during import.

    `str` begins with the given path and says what to do. The exception of the import is the cause.
    """


def load_user(path: str) -> ModuleType:
    """Import `path`: a `.py` file, or a dotted module name. Raises UserCodeError.

    A file is one module for the life of the process, however its path is written. Two files are two modules
    even if their names are equal. A failed import leaves nothing in `sys.modules`, so it can be retried. The
    file's directory is not added to `sys.path`: a file imports its neighbours as any other program would,
    through PYTHONPATH or an installed package.
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
    sys.modules[name] = module  # dataclasses and pickle look it up there
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # nothing may stay after Ctrl-C or SystemExit either
        del sys.modules[name]
        raise _failure(path, error) from error
    return module


def _module(path: str) -> ModuleType:
    before = set(sys.modules)
    try:
        return importlib.import_module(path)
    except BaseException as error:  # as above
        # Python removes the failed module, but not the submodules that a package has already imported.
        for name in [n for n in sys.modules if n.startswith(path + ".") and n not in before]:
            del sys.modules[name]
        raise _failure(path, error) from error


def _failure(path: str, error: BaseException) -> BaseException:
    if not isinstance(error, Exception | SystemExit):
        return error  # Ctrl-C is not the file's fault
    if isinstance(error, ModuleNotFoundError) and _is_absent(path, error.name):
        return UserCodeError(f"{path} does not import: {error!r}; install it or give a .py file")
    return UserCodeError(f"{path} does not import: {error!r}{_line(error, path)}")


def _is_absent(path: str, missing: str | None) -> bool:
    """Whether the missing module is `path` itself rather than something that it imports."""
    return missing is not None and (path == missing or path.startswith(missing + "."))


def _line(error: BaseException, path: str) -> str:
    """Return where in the user's file the import failed, for a message."""
    trace, found = error.__traceback__, ""
    while trace is not None:
        if os.path.realpath(trace.tb_frame.f_code.co_filename) == os.path.realpath(path):
            found = f" (line {trace.tb_lineno})"
        trace = trace.tb_next
    return found
