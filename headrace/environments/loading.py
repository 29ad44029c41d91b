"""Loads the environment that the configuration's `environment` section names."""

from __future__ import annotations

import inspect
from typing import Any

from headrace.config.environment import ENVIRONMENTS, EnvironmentConfig
from headrace.environments.protocol import Environment
from headrace.plugins.user_code import UserCodeError, load_user

_METHODS = ("start", "step", "finish")


class EnvironmentFailed(Exception):
    """An environment could not be loaded, raised, took too long, or returned something invalid."""


def load_environment(config: EnvironmentConfig) -> Environment | None:
    """Make an instance, or return None for `single_turn`, which needs no code.

    Raises EnvironmentFailed, naming the configuration key to correct.
    """
    if config.is_single_turn:
        return None
    made = _found(config)
    where = f"environment: {config.path or 'name'}:{config.name}"
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
    loaded: Environment = environment
    return loaded


def _found(config: EnvironmentConfig) -> Any:
    """The class or function that makes the instance."""
    if config.path is None:
        try:
            return ENVIRONMENTS.get(config.name)
        except ValueError as error:
            raise EnvironmentFailed(f"environment.name: {error}") from error
    try:
        made = getattr(load_user(config.path), config.name, None)
    except UserCodeError as error:
        raise EnvironmentFailed(f"environment.path: {error}") from error
    if not callable(made):
        raise EnvironmentFailed(f"environment.name: {config.path} has no class or function {config.name!r}")
    return made
