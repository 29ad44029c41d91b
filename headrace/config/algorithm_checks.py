"""Import the algorithms that a configuration names, and check that their requirements are met.

Processes that cannot import them read the configuration too. On reading, only the algorithms that ship with
Headrace are checked (`headrace.config.problems`); the rest are checked here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.config.algorithm_names import LOADED, estimator_of, named
from headrace.config.problems import algorithm_problems
from headrace.plugins.user_code import UserCodeError, load_user

if TYPE_CHECKING:
    from headrace.config.run import RunConfig


class AlgorithmError(ValueError):
    """The named algorithms cannot be imported or do not fit the configuration.

    `lines`: one sentence per problem.
    """

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        super().__init__("; ".join(lines))


def load_estimator(config: RunConfig) -> None:
    """Import the estimator's module or package, unless it ships with Headrace. Raises AlgorithmError."""
    if estimator_of(config) is None:
        load_algorithms(config)


def load_algorithms(config: RunConfig) -> None:
    """Import `algorithm.modules` and the packages of the named algorithms, then check the configuration.

    After the import every name and its requirements are known. Raises AlgorithmError.
    """
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
