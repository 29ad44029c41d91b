"""Checks of `trainer.logger` before anything is started."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config.run import RunConfig
from headrace.plugins.trackers import TRACKERS
from headrace.plugins.user_code import UserCodeError
from headrace.records.trackers import wanted


def problems(config: RunConfig) -> Iterator[str]:
    """Problems with the run's trackers. Our own trackers do not import their packages for this."""
    for name in wanted(config):
        try:
            yield from TRACKERS.get(name).problems(config)
        except UserCodeError as error:
            yield f"trainer.logger: {error}"
        except Exception as error:  # a package's code may raise anything
            yield f"trainer.logger: the check of {name} raised {error!r}; leave it out, or correct it"


def warnings(config: RunConfig) -> Iterator[str]:
    for name in wanted(config):
        try:
            yield from TRACKERS.get(name).warnings(config)
        except UserCodeError:
            continue  # reported by `problems`
        except Exception as error:  # a package's code may raise anything
            yield f"trainer.logger: the warnings of {name} raised {error!r}"
