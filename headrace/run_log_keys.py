"""Every key of `metrics.jsonl`, `sync.jsonl` and `eval.jsonl`, defined once: real rows and docs/metrics.md
are checked against it."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Keys:
    """`names` may hold alternatives in braces. `when` they are in a row: "" always, else the case."""

    names: str
    meaning: str
    when: str = ""

    def expanded(self) -> list[str]:
        parts = [part.split(",") for part in re.split(r"\{([^}]*)\}", self.names)]
        # Outside braces a comma separates nothing: such parts are one piece each.
        pieces = [p if i % 2 else [",".join(p)] for i, p in enumerate(parts)]
        return ["".join(chosen) for chosen in itertools.product(*pieces)]


SYNC = "in the row that follows a committed round"
CANARY = "in the row that follows the engines' reports"
TELEMETRY = "once rollouters have reported twice"
WAITS = "in modes that wait for every commit"
CRITIC = "with a critic"
KL_LOSS = "with `actor.use_kl_loss`"
KL_REWARD = "with `algorithm.use_kl_in_reward`"
SAVES = "in an update that saved a checkpoint"
SCORED = "with a reference model"
WEIGHTS = "with `algorithm.rollout_correction.rollout_is`"
ENVIRONMENT = "with an environment of several turns"
TOOLS = "with an environment that counts them, such as `calculator`"
PEAK = "with `trainer.peak_flops`"

REWARD_TIME = "timing_s/reward"
"""Of all seconds those that are not the trainer's."""
PART = "reward_part/"
"""What stands before the name of a part of the reward."""
PARTS = "where the reward gives parts"

DEFINITIONS: tuple[Keys, ...] = (
    Keys("step", "local updates so far, over all starts"),
    Keys("{optimizer_steps,wall_s,trained_tokens}", "optimizer steps, seconds and response tokens so far"),
    Keys("lineage", "number of the trainer's start that wrote the row"),
    Keys("trainer/idle_ratio", "seconds waiting for samples ÷ seconds of the step"),
    Keys(
        "rollouter/idle_ratio",
        "share of the time between two commits in which an engine had no running request",
        TELEMETRY,
    ),
    Keys(
        "rollouter/utilization",
        "running sequences ÷ those of full slots, over time",
        TELEMETRY,
    ),
    Keys(
        "fully_async/count/stale_samples_processed",
        "samples trained with a version gap above 0, so far: one of their trajectories is stale",
    ),
    Keys(
        "fully_async/count/stale_trajectory_processed",
        "trajectories trained that hold a token older than the window's version, so far",
    ),
    Keys(
        "fully_async/count/total_generated_samples",
        "samples that rollouters have finished so far; one that was finished again counts again",
    ),
    Keys(
        "fully_async/count/dropped_stale_samples",
        "samples whose partial work `max_version_gap` has thrown away so far; they started again",
    ),
    Keys("fully_async/count/current_param_version", "committed policy version"),
    Keys(
        "fully_async/partial/{total_partial_num,partial_ratio,max_partial_span}",
        "partial samples trained in the window that closed last, their share, their largest span in versions",
    ),
    Keys("staleness/version_gap/{mean,max,hist}", "over the samples of the update"),
    Keys("staleness/update_gap/{mean,max}", "optimizer steps between the behaviour weights and the update"),
    Keys("staleness/stale_sample_ratio", "stale ÷ trained in the update"),
    Keys(
        "staleness/length_order_corr",
        "rank correlation of a sample's tokens with its place in the order of training: what finishes first "
        "is trained first, and short answers finish first",
    ),
    Keys("timing_s/step", "the whole row; the phases below add up to it, to the nanosecond"),
    Keys(
        REWARD_TIME,
        "mean over the samples: seconds from the end of generation to the last reward. No phase of the step: "
        "rollouters reward while the trainer does something else",
    ),
    Keys("timing_s/gen_wait", "waiting for samples; in the first row of a start from that on"),
    Keys("timing_s/wait_prev_gen", "waiting for the batch that generates meanwhile", WAITS),
    Keys("timing_s/old_log_prob", "scoring under the weights at the start of the window"),
    Keys("timing_s/ref", "scoring under the reference", SCORED),
    Keys("timing_s/{values,update_critic}", "the critic's scores and its update", CRITIC),
    Keys(
        "timing_s/{adv,update_actor,ack,report}",
        "advantages, policy update, acknowledgement, this row until it is made and the end of the one before",
    ),
    Keys("timing_s/other", "between the phases"),
    Keys("timing_s/param_sync", "snapshot, and waiting for the round before", "in the last row of a window"),
    Keys("timing_s/save_checkpoint", "writing a checkpoint", SAVES),
    Keys("sync/{pause_s,transfer_s,commit_s,total_s,interval_s,bytes}", "the round", SYNC),
    Keys(
        "sync/logprob_max_abs_diff",
        "canary: largest log-prob difference of engine and trainer under the newest version reported on",
        CANARY,
    ),
    Keys("queue/{depth,in_flight,dead,requeued}", "samples, as the ledger counts them"),
    Keys("queue/kept", "finished and parked samples that new trainers have kept so far"),
    Keys("queue/dropped", "samples left out of training (`drop_last`, `zero_spread`)"),
    Keys("queue/message_latency_s", "mean seconds from written to read"),
    Keys("queue/oldest_age_s", "age of the oldest finished sample"),
    Keys("queue/rejected", "samples that were not finite and went back"),
    Keys("perf/{samples_per_s,tokens_per_s,steps_per_hour}", "of this step"),
    Keys(
        "perf/mfu",
        "model FLOPs utilisation: 6 · parameters · tokens ÷ (seconds of the step · `trainer.peak_flops` · "
        "ranks), waiting included",
        PEAK,
    ),
    Keys("actor/{pg_loss,pg_clipfrac,pg_clipfrac_lower,entropy}", "token means over all ranks"),
    Keys("actor/ppo_kl", "KL divergence from the old policy to the current one"),
    Keys("actor/{grad_norm,lr}", "of the last optimizer step"),
    Keys("actor/skipped_steps", "steps that were not taken: something was not finite"),
    Keys("actor/{kl_loss,kl_coef}", "divergence to the reference in the loss, and its weight", KL_LOSS),
    Keys(
        "actor/{reward_kl_penalty,reward_kl_penalty_coeff}",
        "divergence to the reference per token, and its coefficient",
        KL_REWARD,
    ),
    Keys(
        "critic/{vf_loss,vf_clipfrac,vf_explained_var,values/mean,returns/mean,grad_norm,skipped_steps,lr}",
        "the critic",
        CRITIC,
    ),
    Keys("rollout_corr/ess", "(Σw)² ÷ (N·Σw²) of current ÷ behaviour, on weights as they are"),
    Keys("rollout_corr/{kl,k3_kl}", "KL divergence from behaviour to current policy, by k1 and k3"),
    Keys("rollout_corr/chi2_token", "χ² divergence: mean of w² − 1"),
    Keys("rollout_corr/ppl_ratio", "perplexity under the current policy ÷ under the behaviour policy"),
    Keys("rollout_corr/clipped_fraction", "importance weights that truncation bounded, before it", WEIGHTS),
    Keys("rollout_corr/masked_fraction", "tokens that the loss or the rollout correction left out"),
    Keys("reward/{mean,std,min,max}", "over the trajectories of the update"),
    Keys(
        f"{PART}NAME",
        "mean over the trajectories that have it: a number in the reward's dictionary, a source of several",
        PARTS,
    ),
    Keys(
        "response_length/{mean,max,clip_ratio}",
        "tokens, the environment's included; `clip_ratio`: cut by the limit",
    ),
    Keys("env/turns/{mean,max}", "turns of the model in a trajectory", ENVIRONMENT),
    Keys("env/{tool_calls,tool_errors}/mean", "per trajectory; likewise whatever else one counts", TOOLS),
    Keys("group/zero_std_ratio", "groups whose rewards are all equal: they teach nothing"),
)

SYNC_ROW: tuple[Keys, ...] = (
    Keys("version", "the policy version that the round committed"),
    Keys("round", "number of the round; one that was given up has a number too"),
    Keys("members", "rollouters that took part"),
    Keys("attempts", "transfers that were begun; more than 1 after a failure"),
    Keys("pause_s", "seconds until the rollouters had paused"),
    Keys("transfer_s", "seconds of the transfer"),
    Keys("commit_s", "seconds of the commit in Redis"),
    Keys("total_s", "seconds of the round"),
    Keys("interval_s", "seconds since the commit before, or since the trainer's start"),
    Keys("bytes", "of weights sent to each rollouter"),
    Keys(
        "rollouters",
        "by incarnation `active_s` and `window_s`, sums since its start that it had told when the trainer "
        "heard of the commit. `rollouter/idle_ratio` is 1 − (growth of the first since the row before ÷ that "
        "of the second), over all",
    ),
    Keys(
        "logprob_max_abs_diff",
        "canary: largest log-prob difference of engine and trainer that a member reported; null without a "
        "report",
    ),
)
"""Keys of a row of `sync.jsonl`."""

EVAL_ROW: tuple[Keys, ...] = (
    Keys("version", "the policy version that was validated"),
    Keys("data_source", "of the held-out prompts"),
    Keys("reward", "mean@k: over the prompts with a result; null without any"),
    Keys("n", "prompts with a result"),
    Keys("unfinished", "prompts without one, or with fewer than k responses"),
    Keys("k", "responses per prompt, `val.n`"),
    Keys("best", "best@k: mean over the prompts of the best response; null with k = 1"),
    Keys(
        "majority",
        "maj@k: mean over the prompts of the answer that most responses gave; null with k = 1",
    ),
)
"""Keys of a row of `eval.jsonl`."""


def score_names(k: int) -> dict[str, str]:
    """Key of a row of `eval.jsonl` -> verl's name of that score with `k` responses. Trackers show it as
    `val/SOURCE/NAME`, Prometheus as a value of the label `statistic`."""
    return {"reward": f"reward/mean@{k}", "best": f"reward/best@{k}", "majority": f"reward/maj@{k}"}


def problems(keys: set[str], present: set[str]) -> list[str]:
    """What `keys`, of all rows of a run, have too many and too few. `present`: the cases that it met."""
    keys = {f"{PART}NAME" if key.startswith(PART) else key for key in keys}
    known = {name for d in DEFINITIONS for name in d.expanded()}
    wanted = {name for d in DEFINITIONS if not d.when or d.when in present for name in d.expanded()}
    return [f"{k}: undocumented" for k in sorted(keys - known)] + [
        f"{k}: documented, but in no row" for k in sorted(wanted - keys)
    ]
