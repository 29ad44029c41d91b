"""Imports the algorithms that a configuration names, and checks that they get what they need.

The configuration is read where they cannot be imported, and checked then as far as what ships with Headrace
goes (`headrace.config.problems`); here the rest is checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.config.algorithm_names import LOADED, estimator_of, named
from headrace.config.problems import algorithm_problems
from headrace.plugins.user_code import UserCodeError, load_user

if TYPE_CHECKING:
    from headrace.config.run import RunConfig


class AlgorithmError(ValueError):
    """The algorithms that a configuration names cannot be imported or do not fit it. `lines`: one sentence
    for each problem."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        super().__init__("; ".join(lines))


def load_estimator(config: RunConfig) -> None:
    """Import what the estimator may come from; a shipped one needs nothing. Raises AlgorithmError."""
    if estimator_of(config) is None:
        load_algorithms(config)


def load_algorithms(config: RunConfig) -> None:
    """Import `algorithm.modules` and the packages of the algorithms that are named, and check the
    configuration, now that every name and its needs are known. Raises AlgorithmError."""
    at = "algorithm.modules"
    try:
        for module in config.algorithm.modules:
            load_user(module)
            LOADED.add(module)
        for key, name, registry in named(config):
            at = key
            if registry.knows(name):
                registry.get(name)
    except UserCodeError as error:
        raise AlgorithmError([f"{at}: {error}"]) from error
    if problems := list(algorithm_problems(config)):
        raise AlgorithmError(problems)
