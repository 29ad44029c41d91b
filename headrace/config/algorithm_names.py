"""Look up the algorithms that a configuration names, among those imported so far. Does not import torch.

A module of `algorithm.modules` may register a name, and some processes that read the configuration cannot
import it. Until those modules are imported, unknown names are accepted.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headrace.algorithms.registries import (
    ADVANTAGE_ESTIMATORS,
    AGGREGATIONS,
    LOSS_SETTINGS,
    POLICY_LOSSES,
    Estimator,
    PolicyLoss,
)
from headrace.plugins.registry import Registry

if TYPE_CHECKING:
    from headrace.config.run import RunConfig

LOADED: set[str] = set()
"""The modules of `algorithm.modules` that this process has imported."""


def estimator_of(config: RunConfig) -> Estimator | None:
    """None while its module or package has not been imported."""
    return ADVANTAGE_ESTIMATORS.loaded(config.algorithm.adv_estimator)


def loss_of(config: RunConfig) -> PolicyLoss | None:
    """None while its module or package has not been imported."""
    return POLICY_LOSSES.loaded(config.actor.policy_loss)


def name_problems(config: RunConfig) -> Iterator[str]:
    """Yield a problem for each unknown name or setting, and for groups that are too small."""
    modules = config.algorithm.modules
    if set(modules) <= LOADED:
        for key, name, registry in named(config):
            if not registry.knows(name):
                yield _unknown(f"{key} = {name}", name, registry.names(), modules)
    estimator, group = estimator_of(config), config.rollout.n
    if estimator is not None and group < estimator.smallest_group:
        yield (
            f"rollout.n is {group}, but {config.algorithm.adv_estimator} compares the trajectories of a "
            f"group: set rollout.n to {estimator.smallest_group} or more"
        )
    loss = loss_of(config)
    if loss is not None and loss.settings is not None:
        known = LOSS_SETTINGS.union(loss.settings)
        for setting in sorted(set(config.actor.policy_loss_settings) - known):
            yield _unknown(f"actor.policy_loss_settings = {setting}", setting, sorted(known), modules)


def named(config: RunConfig) -> Iterator[tuple[str, str, Registry[Any]]]:
    yield "algorithm.adv_estimator", config.algorithm.adv_estimator, ADVANTAGE_ESTIMATORS
    yield "actor.policy_loss", config.actor.policy_loss, POLICY_LOSSES
    if config.actor.loss_agg_mode is not None:
        yield "actor.loss_agg_mode", config.actor.loss_agg_mode, AGGREGATIONS
    if config.critic.enable:
        yield "critic.loss_agg_mode", config.critic.loss_agg_mode, AGGREGATIONS


def _unknown(what: str, name: str, known: list[str], modules: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
    own = f"{', '.join(modules)} registers no such name" if modules else "your own need algorithm.modules"
    return f"{what} is unknown; {hint} ({own})"
