"""The keys of `metrics.jsonl`: one entry each, from which everything follows.

Each is a constant, its name in capitals with `_` for `/`. Whoever writes or reads a row says
`row_keys.ACTOR_ENTROPY`, so that a misspelt name fails in mypy. The entry has the line of docs/metrics.md,
the trainer's gauge, the chart of `headrace report` and the panel of the dashboard. Rows of real runs are
checked against the table (`problems`).
"""

from __future__ import annotations

from headrace.metrics.row_entry import SAME, RowTable
from headrace.metrics.views import Chart, Graph

TABLE = RowTable()
key = TABLE.key

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
ENVIRONMENT = "with a multi-turn environment"
TOOLS = "with an environment that counts them, such as `calculator`"
PEAK = "with `trainer.peak_flops`"

PART = "reward_part/"
"""What stands before the name of a part of the reward."""
PARTS = "if the reward has parts"

STEP = key("step", "local updates so far, over all starts")
OPTIMIZER_STEPS = key("optimizer_steps", "optimizer steps, seconds and response tokens so far")
WALL_S = key("wall_s", SAME)
TRAINED_TOKENS = key("trained_tokens", SAME)
LINEAGE = key("lineage", "number of the trainer's start that wrote the row")
TRAINER_IDLE_RATIO = key(
    "trainer/idle_ratio",
    "seconds waiting for samples ÷ seconds of the step",
    chart=Chart(
        "Where the time goes",
        "Trainer idle",
        "idle",
        unit="share of the step",
        percent=True,
        smooth=True,
        about="Seconds waiting for samples ÷ seconds of the step.",
    ),
)
ROLLOUTER_IDLE_RATIO = key(
    "rollouter/idle_ratio",
    "share of the time between two commits in which an engine had no running request",
    when=TELEMETRY,
    chart=Chart(
        "Where the time goes",
        "Rollouters idle",
        "idle",
        unit="share of the time between syncs",
        percent=True,
        smooth=True,
        about="Time in which an engine had no running request.",
    ),
)
ROLLOUTER_UTILIZATION = key(
    "rollouter/utilization",
    "running sequences ÷ those with every slot taken, averaged over time",
    when=TELEMETRY,
    chart=Chart(
        "Where the time goes",
        "Rollouter slots in use",
        "in use",
        unit="share of slots",
        percent=True,
        smooth=True,
    ),
)
FULLY_ASYNC_COUNT_STALE_SAMPLES_PROCESSED = key(
    "fully_async/count/stale_samples_processed",
    "samples trained with a version gap above 0, so far: one of their trajectories is stale",
)
FULLY_ASYNC_COUNT_STALE_TRAJECTORY_PROCESSED = key(
    "fully_async/count/stale_trajectory_processed",
    "trajectories trained that hold a token older than the window's version, so far",
)
FULLY_ASYNC_COUNT_TOTAL_GENERATED_SAMPLES = key(
    "fully_async/count/total_generated_samples",
    "samples finished by rollouters so far; one finished again counts again",
)
FULLY_ASYNC_COUNT_DROPPED_STALE_SAMPLES = key(
    "fully_async/count/dropped_stale_samples",
    "samples restarted so far because `max_version_gap` discarded their partial work",
)
FULLY_ASYNC_COUNT_CURRENT_PARAM_VERSION = key(
    "fully_async/count/current_param_version", "committed policy version"
)
FULLY_ASYNC_PARTIAL_TOTAL_PARTIAL_NUM = key(
    "fully_async/partial/total_partial_num",
    "partial samples trained in the last closed window, their share, their largest span in versions",
)
FULLY_ASYNC_PARTIAL_PARTIAL_RATIO = key(
    "fully_async/partial/partial_ratio",
    SAME,
    chart=Chart(
        "Staleness",
        "Partial samples",
        "partial",
        unit="share between syncs",
        percent=True,
        smooth=True,
        about="Samples with tokens of several versions.",
    ),
)
FULLY_ASYNC_PARTIAL_MAX_PARTIAL_SPAN = key(
    "fully_async/partial/max_partial_span",
    SAME,
    chart=Chart("Staleness", "Largest span of a partial sample", "span", unit="versions"),
)
STALENESS_VERSION_GAP_MEAN = key("staleness/version_gap/mean", "over the samples of the update")
STALENESS_VERSION_GAP_MAX = key("staleness/version_gap/max", SAME)
STALENESS_VERSION_GAP_HIST = key("staleness/version_gap/hist", SAME)
STALENESS_UPDATE_GAP_MEAN = key(
    "staleness/update_gap/mean", "optimizer steps between the behaviour weights and the update"
)
STALENESS_UPDATE_GAP_MAX = key("staleness/update_gap/max", SAME)
STALENESS_STALE_SAMPLE_RATIO = key(
    "staleness/stale_sample_ratio",
    "stale ÷ trained in the update",
    chart=Chart("Staleness", "Stale samples", "stale", unit="share of the update", percent=True, smooth=True),
)
STALENESS_LENGTH_ORDER_CORR = key(
    "staleness/length_order_corr",
    "rank correlation of a sample's tokens with its training order: what finishes first is trained first, "
    "and short answers finish first",
    chart=Chart(
        "Staleness",
        "Length and order of training",
        "correlation",
        unit="rank correlation",
        smooth=True,
        about="Far above 0: long answers are always trained late, so they are the stale ones.",
    ),
)
TIMING_S_STEP = key(
    "timing_s/step",
    "the whole row; the phases below add up to it, to the nanosecond",
    chart=Chart("Where the time goes", "Seconds per step", "step", unit="s", smooth=True),
)
TIMING_S_REWARD = key(
    "timing_s/reward",
    "mean over the samples: seconds from the end of generation to the last reward. Not a phase of "
    "the step: rollouters compute rewards while the trainer does something else",
)
TIMING_S_GEN_WAIT = key(
    "timing_s/gen_wait", "waiting for samples; in the first row after a start, counted from the start"
)
TIMING_S_WAIT_PREV_GEN = key(
    "timing_s/wait_prev_gen", "waiting for the batch that is generated meanwhile", when=WAITS
)
TIMING_S_OLD_LOG_PROB = key("timing_s/old_log_prob", "scoring under the weights at the start of the window")
TIMING_S_REF = key("timing_s/ref", "scoring under the reference", when=SCORED)
TIMING_S_VALUES = key("timing_s/values", "the critic's scores and its update", when=CRITIC)
TIMING_S_UPDATE_CRITIC = key("timing_s/update_critic", SAME)
TIMING_S_ADV = key(
    "timing_s/adv",
    "advantages, policy update, acknowledgement, making this row and finishing the previous one",
)
TIMING_S_UPDATE_ACTOR = key("timing_s/update_actor", SAME)
TIMING_S_ACK = key("timing_s/ack", SAME)
TIMING_S_REPORT = key("timing_s/report", SAME)
TIMING_S_OTHER = key("timing_s/other", "between the phases")
TIMING_S_PARAM_SYNC = key(
    "timing_s/param_sync", "snapshot, and waiting for the previous round", when="in the last row of a window"
)
TIMING_S_SAVE_CHECKPOINT = key("timing_s/save_checkpoint", "writing a checkpoint", when=SAVES)
SYNC_PAUSE_S = key("sync/pause_s", "the round", when=SYNC)
SYNC_TRANSFER_S = key("sync/transfer_s", SAME)
SYNC_COMMIT_S = key("sync/commit_s", SAME)
SYNC_TOTAL_S = key("sync/total_s", SAME)
SYNC_INTERVAL_S = key("sync/interval_s", SAME)
SYNC_BYTES = key("sync/bytes", SAME)
SYNC_LOGPROB_MAX_ABS_DIFF = key(
    "sync/logprob_max_abs_diff",
    "canary: largest log-prob difference between engine and trainer under the newest reported version",
    when=CANARY,
)
QUEUE_DEPTH = key("queue/depth", "samples, as the ledger counts them")
QUEUE_IN_FLIGHT = key("queue/in_flight", SAME)
QUEUE_DEAD = key("queue/dead", SAME)
QUEUE_REQUEUED = key("queue/requeued", SAME)
QUEUE_KEPT = key("queue/kept", "finished and parked samples that new trainers have kept so far")
QUEUE_DROPPED = key("queue/dropped", "samples left out of training (`drop_last`, `zero_spread`)")
QUEUE_MESSAGE_LATENCY_S = key(
    "queue/message_latency_s",
    "mean seconds from written to read",
    chart=Chart("Queue", "Wait in the queue", "mean", unit="s from written to read", smooth=True),
)
QUEUE_OLDEST_AGE_S = key(
    "queue/oldest_age_s",
    "age of the oldest finished sample",
    chart=Chart("Queue", "Oldest finished sample", "age", unit="s", smooth=True),
)
QUEUE_REJECTED = key("queue/rejected", "samples sent back because they were not finite")
PERF_SAMPLES_PER_S = key(
    "perf/samples_per_s",
    "of this step",
    chart=Chart("Where the time goes", "Samples trained", "samples/s", unit="samples/s", smooth=True),
)
PERF_TOKENS_PER_S = key(
    "perf/tokens_per_s",
    SAME,
    chart=Chart(
        "Where the time goes", "Training throughput", "tokens/s", unit="response tokens/s", smooth=True
    ),
)
PERF_STEPS_PER_HOUR = key("perf/steps_per_hour", SAME)
PERF_MFU = key(
    "perf/mfu",
    "model FLOPs utilisation: 6 · parameters · tokens ÷ (seconds of the step · `trainer.peak_flops` · "
    "ranks), waiting included",
    when=PEAK,
    chart=Chart(
        "Where the time goes",
        "Model FLOPs utilisation",
        "mfu",
        unit="share of peak",
        percent=True,
        smooth=True,
    ),
)
ACTOR_PG_LOSS = key(
    "actor/pg_loss",
    "token means over all ranks",
    gauge="Policy loss, mean over the trained tokens",
    chart=Chart("Policy", "Policy loss", "loss", smooth=True),
)
ACTOR_PG_CLIPFRAC = key(
    "actor/pg_clipfrac", SAME, gauge="Share of the tokens whose policy ratio the loss clipped"
)
ACTOR_PG_CLIPFRAC_LOWER = key(
    "actor/pg_clipfrac_lower", SAME, gauge="Share of the tokens that the dual clip bounded"
)
ACTOR_ENTROPY = key(
    "actor/entropy",
    SAME,
    gauge="Entropy of the policy in nats, mean over the trained tokens",
    chart=Chart("Policy", "Entropy", "entropy", unit="nats per token", smooth=True),
    graph=Graph("Trainer", "Entropy"),
)
ACTOR_PPO_KL = key(
    "actor/ppo_kl",
    "KL divergence from the old policy to the current one",
    gauge="KL divergence from the old policy to the current one, per token",
)
ACTOR_GRAD_NORM = key(
    "actor/grad_norm",
    "of the last optimizer step",
    gauge="Norm of the policy's gradient before clipping, in the last optimizer step",
    chart=Chart("Policy", "Gradient norm", "norm", unit="before clipping", smooth=True),
    graph=Graph("Trainer", "Gradient norm"),
)
ACTOR_LR = key(
    "actor/lr",
    SAME,
    gauge="Learning rate of the policy",
    chart=Chart("Policy", "Learning rate", "lr"),
    graph=Graph("Trainer", "Learning rate", "sci"),
)
ACTOR_SKIPPED_STEPS = key("actor/skipped_steps", "steps skipped because something was not finite")
ACTOR_KL_LOSS = key("actor/kl_loss", "divergence to the reference in the loss, and its weight", when=KL_LOSS)
ACTOR_KL_COEF = key("actor/kl_coef", SAME)
ACTOR_REWARD_KL_PENALTY = key(
    "actor/reward_kl_penalty", "divergence to the reference per token, and its coefficient", when=KL_REWARD
)
ACTOR_REWARD_KL_PENALTY_COEFF = key("actor/reward_kl_penalty_coeff", SAME)
CRITIC_VF_LOSS = key(
    "critic/vf_loss", "the critic", when=CRITIC, chart=Chart("Policy", "Critic loss", "loss", smooth=True)
)
CRITIC_VF_CLIPFRAC = key("critic/vf_clipfrac", SAME)
CRITIC_VF_EXPLAINED_VAR = key(
    "critic/vf_explained_var",
    SAME,
    chart=Chart("Policy", "Explained variance of the critic", "explained", unit="share", smooth=True),
)
CRITIC_VALUES_MEAN = key("critic/values/mean", SAME)
CRITIC_RETURNS_MEAN = key("critic/returns/mean", SAME)
CRITIC_GRAD_NORM = key("critic/grad_norm", SAME)
CRITIC_SKIPPED_STEPS = key("critic/skipped_steps", SAME)
CRITIC_LR = key("critic/lr", SAME)
ROLLOUT_CORR_ESS = key(
    "rollout_corr/ess",
    "(Σw)² ÷ (N·Σw²) of current ÷ behaviour, on untruncated weights",
    gauge="Effective sample size as a share of the samples, from untruncated importance weights, 0 to 1",
    chart=Chart(
        "Policy",
        "Effective sample size",
        "ESS",
        unit="share",
        percent=True,
        smooth=True,
        about="Of current ÷ behaviour importance weights; 100 % is on-policy.",
    ),
    graph=Graph(
        "Staleness",
        "Effective sample size",
        "percentunit",
        about="On untruncated importance weights. Below one half, most samples hardly count.",
    ),
)
ROLLOUT_CORR_KL = key(
    "rollout_corr/kl",
    "KL divergence from behaviour to current policy, by k1 and k3",
    gauge="KL divergence from the sampling policy to the current one, per token",
)
ROLLOUT_CORR_K3_KL = key(
    "rollout_corr/k3_kl", SAME, gauge="KL divergence from the sampling policy by the k3 estimator, per token"
)
ROLLOUT_CORR_CHI2_TOKEN = key(
    "rollout_corr/chi2_token",
    "χ² divergence: mean of w² − 1",
    gauge="Chi-squared divergence from the sampling policy: mean of w^2 - 1",
    chart=Chart("Policy", "χ² divergence", "χ²", unit="mean of w² − 1", smooth=True),
)
ROLLOUT_CORR_PPL_RATIO = key(
    "rollout_corr/ppl_ratio",
    "perplexity under the current policy ÷ under the behaviour policy",
    gauge="Perplexity under the current policy ÷ that under the sampling policy",
    graph=Graph("Staleness", "Perplexity ratio"),
)
ROLLOUT_CORR_CLIPPED_FRACTION = key(
    "rollout_corr/clipped_fraction",
    "share of the importance weights that truncation bounded",
    when=WEIGHTS,
    gauge="Share of the importance weights that truncation bounded",
    absent=0.0,
)
ROLLOUT_CORR_MASKED_FRACTION = key(
    "rollout_corr/masked_fraction",
    "share of the tokens excluded by the loss or the rollout correction",
    gauge="Share of the tokens excluded by the loss or the rollout correction",
    chart=Chart("Policy", "Tokens left out", "masked", unit="share of tokens", percent=True, smooth=True),
)
REWARD_MEAN = key(
    "reward/mean",
    "over the trajectories of the update",
    gauge="Mean reward of the trained trajectories",
    chart=Chart("Learning", "Reward", "mean", unit="mean of the update", smooth=True),
    graph=Graph("Overview", "Reward", legend="mean {{release}}"),
)
REWARD_STD = key(
    "reward/std",
    SAME,
    chart=Chart("Learning", "Spread of the reward", "std", unit="standard deviation", smooth=True),
)
REWARD_MIN = key("reward/min", SAME)
REWARD_MAX = key("reward/max", SAME)
REWARD_PART_NAME = key(
    f"{PART}NAME",
    "mean over the trajectories that have it: a number in the reward's dictionary, a source of several",
    when=PARTS,
)
RESPONSE_LENGTH_MEAN = key(
    "response_length/mean",
    "tokens, the environment's included; `clip_ratio`: share cut off by the limit",
    gauge="Mean tokens of a trained response, the environment's included",
    unread="counters give the same over any time range",
)
RESPONSE_LENGTH_MAX = key("response_length/max", SAME)
RESPONSE_LENGTH_CLIP_RATIO = key(
    "response_length/clip_ratio",
    SAME,
    gauge="Share of the trained responses cut off by the limit",
    chart=Chart("Lengths", "Cut by the length limit", "cut", unit="share of responses", percent=True),
)
ENV_TURNS_MEAN = key("env/turns/mean", "model turns per trajectory", when=ENVIRONMENT)
ENV_TURNS_MAX = key("env/turns/max", SAME)
ENV_TOOL_CALLS_MEAN = key(
    "env/tool_calls/mean", "per trajectory; likewise anything else that the environment counts", when=TOOLS
)
ENV_TOOL_ERRORS_MEAN = key("env/tool_errors/mean", SAME)
GROUP_ZERO_STD_RATIO = key(
    "group/zero_std_ratio",
    "share of the groups whose rewards are all equal: they give no learning signal",
    gauge="Share of the groups whose rewards are all equal and give no learning signal",
    chart=Chart(
        "Learning",
        "Groups without spread",
        "share",
        unit="share of groups",
        percent=True,
        smooth=True,
        about="All rewards of the group are equal: it gives no learning signal.",
    ),
)


def problems(keys: set[str], present: set[str]) -> list[str]:
    """What `keys`, of all rows of a run, have too many and too few. `present`: the cases that it met."""
    keys = {REWARD_PART_NAME if key.startswith(PART) else key for key in keys}
    wanted = {e.name for e in TABLE.entries.values() if not e.when or e.when in present}
    return [f"{k}: undocumented" for k in sorted(keys - TABLE.entries.keys())] + [
        f"{k}: documented, but in no row" for k in sorted(wanted - keys)
    ]
