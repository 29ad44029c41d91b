"""Environments: what answers the model between its turns. `protocol` says what one is."""

from headrace.environments.protocol import (
    Done,
    Environment,
    Episode,
    Observation,
    Outcome,
    Passage,
    State,
    Task,
    Turn,
)

__all__ = ["Done", "Environment", "Episode", "Observation", "Outcome", "Passage", "State", "Task", "Turn"]
