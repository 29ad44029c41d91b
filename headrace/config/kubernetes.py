"""Configuration of the coordinator in a Kubernetes cluster, and of its recommended rollouter count."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headrace.config.base import LIVE, Section


class RecommendationConfig(Section):
    """How many rollouters are advised, from both idle ratios; `kubectl scale` or KEDA may obey."""

    min_rollouters: int = Field(1, ge=0)
    """Least that is advised while the run is on."""
    max_rollouters: int = Field(64, gt=0)
    """Most that is advised."""
    tolerance: float = Field(0.15, gt=0, lt=1)
    """No advice to change by less than this share."""
    windows: int = Field(3, gt=0)
    """Sync windows in a row that must ask for a change in the same direction."""
    down_interval_s: float = Field(600.0, ge=0)
    """Least time between two steps down, each by one rollouter."""


class KubernetesConfig(Section):
    """Needs `headrace[kubernetes]`, and a service account that may do what docs/kubernetes.md lists."""

    enable: bool = False
    """The coordinator watches the rollouters' pods and tells the cluster what goes on."""
    namespace: str | None = None
    """Namespace of the run; unset: that of the coordinator's own pod."""
    rollouter_deployment: str = "headrace-rollouter"
    """Deployment of the rollouters; the name of a pod is its `--replica`."""
    trainer_deployment: str = "headrace-trainer"
    """Deployment of the trainer's nodes, or what `trainer_kind` says."""
    trainer_kind: Literal["Deployment", "LeaderWorkerSet"] = "Deployment"
    """LeaderWorkerSet: the nodes are its one group."""
    scale_to_zero_on_completion: Annotated[bool, LIVE] = False
    """Scale rollouters and trainer to 0 once the trained model is exported."""
    deletion_cost_interval_s: Annotated[float, LIVE] = Field(30.0, gt=0)
    """Least time between two changes of one pod's deletion cost, which follows its tokens in flight."""
    request_timeout_s: Annotated[float, LIVE] = Field(10.0, gt=0)
    """Longest wait for one answer of the Kubernetes API."""
    recommendation: Annotated[RecommendationConfig, LIVE] = RecommendationConfig()
