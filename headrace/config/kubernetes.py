"""Configuration of the coordinator in a Kubernetes cluster, and of its recommended rollouter count."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headrace.config.base import LIVE, Section


class RecommendationConfig(Section):
    """The recommended number of rollouters, from both idle ratios; `kubectl scale` or KEDA can apply it."""

    min_rollouters: int = Field(1, ge=0)
    """Smallest recommendation while the run is in progress."""
    max_rollouters: int = Field(64, gt=0)
    """Largest recommendation."""
    tolerance: float = Field(0.15, gt=0, lt=1)
    """Changes smaller than this share are not recommended."""
    windows: int = Field(3, gt=0)
    """Consecutive sync windows that must call for a change in the same direction."""
    down_interval_s: float = Field(600.0, ge=0)
    """Shortest time between two steps down, each by one rollouter."""


class KubernetesConfig(Section):
    """Needs `headrace[kubernetes]` and a service account with the permissions listed in
    docs/kubernetes.md."""

    enable: bool = False
    """The coordinator watches the rollouters' pods and reports to the cluster."""
    namespace: str | None = None
    """Namespace of the run; unset: that of the coordinator's own pod."""
    rollouter_deployment: str = "headrace-rollouter"
    """Deployment of the rollouters; a pod's name is its `--replica`."""
    trainer_deployment: str = "headrace-trainer"
    """Deployment of the trainer's nodes, or the object of kind `trainer_kind`."""
    trainer_kind: Literal["Deployment", "LeaderWorkerSet"] = "Deployment"
    """LeaderWorkerSet: the nodes form its only group."""
    scale_to_zero_on_completion: Annotated[bool, LIVE] = False
    """Scale rollouters and trainer to 0 once the trained model is exported."""
    deletion_cost_interval_s: Annotated[float, LIVE] = Field(30.0, gt=0)
    """Shortest time between two changes of a pod's deletion cost, which follows its tokens in flight."""
    request_timeout_s: Annotated[float, LIVE] = Field(10.0, gt=0)
    """Longest wait for one response from the Kubernetes API."""
    recommendation: Annotated[RecommendationConfig, LIVE] = RecommendationConfig()
