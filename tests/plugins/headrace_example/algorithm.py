from headrace.algorithms.estimator import AdvantageInput, AdvantageOutput, Estimator, per_trajectory
from headrace.algorithms.policy_loss import PolicyLoss, PolicyLossInput, TokenLosses, finish


def above_greedy(batch: AdvantageInput) -> AdvantageOutput:
    """How far a response is above the greedy one to the same prompt."""
    baseline = batch.require("reward_baselines", "above_greedy")
    return per_trajectory(batch, batch.scores() - baseline)


def squared(inputs: PolicyLossInput) -> TokenLosses:
    """-A * log p, and `pull` times the squared distance to the old policy."""
    pull = inputs.settings.extra.get("pull", 0.1)
    moved = (inputs.log_probs - inputs.old_log_probs).square()
    return finish(inputs, pull * moved - inputs.advantages * inputs.log_probs)


ABOVE_GREEDY = Estimator(above_greedy, greedy_baseline=True)
SQUARED = PolicyLoss(squared, settings=("pull",))
