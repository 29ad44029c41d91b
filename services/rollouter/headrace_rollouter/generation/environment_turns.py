"""Builds the configured environment, ready to answer turns."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from headrace.config.run import RunConfig
from headrace.data.tokenizer import load_tokenizer
from headrace.environments import Environment, Observation
from headrace.environments.host import EnvironmentHost
from headrace.environments.loading import load_environment
from headrace_rollouter.generation.observations import ObservationEncoder


@dataclass(frozen=True)
class EnvironmentTurns:
    """An environment and the encoder of its observations."""

    host: EnvironmentHost
    encode: Callable[[Observation], list[int]]


def environment_turns(
    config: RunConfig, stop_ids: Collection[int], vocabulary: int
) -> EnvironmentTurns | None:
    """Build the environment, or return None for single-turn runs.

    `vocabulary`: number of token ids that the model knows. Raises EnvironmentFailed and DataError.
    """
    if config.environment.is_single_turn:
        return None

    def make() -> Environment:
        made = load_environment(config.environment)
        assert made is not None
        return made

    host = EnvironmentHost(make, config.environment.step_timeout_s)
    kwargs = config.data.apply_chat_template_kwargs
    encoder = ObservationEncoder(load_tokenizer(config), stop_ids, vocabulary, kwargs)
    return EnvironmentTurns(host, encoder.encode)
