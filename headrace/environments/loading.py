"""From the configuration's `environment` section to an instance."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from headrace.config_env import BUILT_IN, EnvironmentConfig
from headrace.environments.protocol import Environment

_METHODS = ("start", "step", "finish")


class EnvironmentFailed(Exception):
    """An environment cannot be loaded, raised, took too long, or returned what it must not."""


def load_environment(config: EnvironmentConfig) -> Environment | None:
    """None for `single_turn`, which needs no code. Raises EnvironmentFailed, naming the key to correct."""
    if config.is_single_turn:
        return None
    path, name = (config.path, config.name) if config.path is not None else BUILT_IN[config.name]
    made = getattr(_module(path), name, None)
    if not callable(made):
        raise EnvironmentFailed(f"environment.name: {path} has no class or function {name!r}")
    where = f"environment: {path}:{name}"
    try:
        environment = made(**config.kwargs)
    except (Exception, SystemExit) as error:  # user code
        raise EnvironmentFailed(f"{where}(**environment.kwargs) raised {error!r}") from error
    for method in _METHODS:
        if not inspect.iscoroutinefunction(getattr(environment, method, None)):
            raise EnvironmentFailed(
                f"{where} has no `async def {method}`; inherit from headrace.environments.Environment, which "
                "brings start and finish, and write step"
            )
    return environment


def _module(path: str) -> ModuleType:
    """A Python file or an importable module."""
    try:
        if not path.endswith(".py"):
            return importlib.import_module(path)
        file = Path(path).resolve()
        if not file.exists():
            raise EnvironmentFailed(f"environment.path: {path} does not exist")
        spec = importlib.util.spec_from_file_location(f"headrace_environment_{file.stem}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    except EnvironmentFailed:
        raise
    except (Exception, SystemExit) as error:  # user code: whatever its import raises is the answer
        raise EnvironmentFailed(f"environment.path: {path} does not import: {error!r}") from error
