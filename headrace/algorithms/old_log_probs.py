"""Which log-probs a policy loss calls "old", and how to notice that they are the wrong ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class OldLogProbs:
    """`log_probs`: (B, T). `corrected`: whether weights old / behaviour belong on top of them."""

    log_probs: torch.Tensor
    corrected: bool


def choose_old(
    use_rollout_log_probs: bool, behaviour: torch.Tensor, recomputed: torch.Tensor | None
) -> OldLogProbs:
    """The old log-probs by configuration.

    True: the engine's, token by token, each under the version that sampled it; a second weight would count
    the mismatch twice. False: `recomputed` by the trainer under the weights at the start of the sync window,
    and the rollout correction weighs them against the engine's.
    """
    if use_rollout_log_probs:
        return OldLogProbs(behaviour, corrected=False)
    if recomputed is None:
        raise ValueError(
            "use_rollout_log_probs is false, so the trainer must recompute log-probs under the weights at "
            "the start of the sync window; set it to true to use the engine's"
        )
    return OldLogProbs(recomputed, corrected=True)


def clipping_is_disabled(log_probs: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether every ratio of the mask is exactly 1. All (B, T).

    Right on the first update after a sync with recomputed log-probs. Afterwards it means that "old" was
    recomputed with the current weights: nothing is ever clipped, and stale data looks on-policy.
    """
    on = mask > 0
    return bool(on.any()) and bool((log_probs.detach() == old)[on].all())
