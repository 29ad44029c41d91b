"""Environments, which answer the model between its turns. `protocol` defines the interface."""

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
