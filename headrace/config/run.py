"""The run's configuration: one pydantic model, the same for every service, local or in a cluster.

Keys have verl's names where the meaning is the same. Unknown keys are refused, and `headrace.config.loading`
adds the nearest known one to the message. Inconsistent values are refused when the file is read, with
the fix.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from headrace.algorithms.registries import Estimator
from headrace.config.algorithm import ActorConfig, AlgorithmConfig, CriticConfig, RefConfig
from headrace.config.algorithm_names import estimator_of
from headrace.config.base import INITIAL, LIVE, RUN, RUN_NOT_IN_LEDGER, Section
from headrace.config.data import DataConfig
from headrace.config.environment import EnvironmentConfig
from headrace.config.gpu_arithmetic import Sharing, sharing
from headrace.config.kubernetes import KubernetesConfig
from headrace.config.problems import cross_field_problems
from headrace.config.reading import DumpConfig
from headrace.config.reward import CustomRewardConfig, RewardConfig
from headrace.config.staleness import MODE_PARAMETERS, Mode, StalenessRule, derive_mode
from headrace.plugins.engines import ENGINES
from headrace.plugins.trackers import CONSOLE, known_tracker
from headrace.plugins.transports import TRANSPORTS


class ModelConfig(Section):
    """The policy: a Hugging Face model directory."""

    path: Annotated[str, RUN]
    """Directory with config.json, tokenizer and safetensors weights, or a demo: `demo:spell_backward`,
    `demo:long_tail`, `demo:calculator`."""
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], RUN] = "bfloat16"
    """Compute and wire dtype: the engine runs in it and weights travel in it."""
    max_model_len: int | None = Field(None, gt=0)
    """Longest prompt + response in tokens that the engine is built for; unset: the sum of both limits."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model directory."""
    enable_gradient_checkpointing: bool | None = None
    """Keep one activation per layer and token and recompute the rest in the backward pass: a third more time,
    a tenth of the memory. Unset: on for models with over 1 B parameters."""

    def recomputes(self, parameters: int) -> bool:
        """Whether a model with that many parameters recomputes activations in the backward pass."""
        wanted = self.enable_gradient_checkpointing
        return parameters > 10**9 if wanted is None else wanted


class EngineConfig(Section):
    """Settings of each rollouter's vLLM engine."""

    tensor_parallel_size: int = Field(1, gt=0)
    """GPUs per engine."""
    kv_cache_memory_bytes: int = Field(256 * 1024 * 1024, gt=0)
    """KV cache on the CPU backend, bytes."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of the GPU memory that the engine may use (CUDA). With `mode: colocated_sync` the trainer, on the
    same GPU, gets the rest."""
    max_num_seqs: int = Field(128, gt=0)
    """Sequences the engine runs at once."""
    enforce_eager: bool = True
    """Run without CUDA graphs and compilation; false is faster on GPUs. On CPU nothing is compiled."""
    omp_threads: int = Field(1, gt=0)
    """Threads of the CPU backend, per replica."""


class RolloutConfig(Section):
    """Generation: sampling, volume, concurrency and engine."""

    name: Annotated[str, AfterValidator(ENGINES.checked)] = "vllm"
    """The inference engine: `vllm`, or one from an installed package."""
    n: Annotated[int, RUN] = Field(8, gt=0)
    """Trajectories per sample (the group size)."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of training rollouts; stored with each trajectory."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most likely tokens whose probabilities add up to this; 1 for all."""
    top_k: int = Field(-1, ge=-1)
    """Sample from this many of the most likely tokens; -1 for all."""
    total_rollout_steps: Annotated[int, RUN] = Field(gt=0)
    """Samples to generate and train in the whole run."""
    test_freq: int = Field(10, ge=0)
    """Policy versions between validations; the first and the last are always validated. 0 turns it off."""
    replicas: Annotated[int, INITIAL] = Field(2, ge=0)
    """Rollouters that the local runner starts with; `headrace scale` changes their number."""
    cpus: list[int] | None = Field(None, min_length=1)
    """Cores that the rollouters of a local run are bound to; unset: any."""
    max_concurrent_samples: int = Field(8, gt=0)
    """Samples that one rollouter works on at once."""
    sample_timeout_s: float = Field(600.0, gt=0)
    """Deadline of one sample from take to finish, pauses excluded."""
    engine: EngineConfig = EngineConfig()


class AsyncTrainingConfig(Section):
    """How generation and training overlap. The mode is derived from these (`headrace run --dry-run`)."""

    require_batches: int = Field(1, gt=0)
    """R: mini-batches that the trainer claims at once."""
    trigger_parameter_sync_step: Annotated[int, LIVE] = Field(1, gt=0)
    """S: local updates between two syncs."""
    staleness_threshold: Annotated[float, LIVE] = Field(0.0, ge=0, le=64)
    """Eta: how much may be generated beyond the current window, as a share of it."""
    partial_rollout: bool = False
    """Interrupt running work at a sync and continue it under the new weights. It has an effect only when
    `staleness_threshold` is above 0; unset: true there."""
    max_version_gap: int | None = Field(None, gt=0)
    """K: with partial rollout, running work that would get tokens of more than K versions finishes before the
    sync. Unset: no bound."""
    use_rollout_log_probs: bool = True
    """Use the engine's log-probs, token by token, as the ratio's old log-probs; false: the trainer recomputes
    them under the weights at the start of the sync window."""

    @model_validator(mode="before")
    @classmethod
    def _partial_only_with_staleness(cls, data: Any) -> Any:
        """Fill in the default of `partial_rollout`, so that the resolved configuration shows it."""
        if not isinstance(data, dict) or data.get("partial_rollout") is not None:
            return data
        try:
            positive = float(data.get("staleness_threshold", 0.0)) > 0
        except (TypeError, ValueError):
            positive = False  # the field's own validation refuses it
        return {**data, "partial_rollout": positive}


class TrainerConfig(Section):
    """Ranks, checkpoints, limits and trackers."""

    nnodes: int = Field(1, gt=0)
    """Trainer nodes."""
    n_gpus_per_node: int = Field(2, gt=0)
    """Ranks per node (processes; GPUs when `device` is cuda)."""
    cpus: list[int] | None = Field(None, min_length=1)
    """Cores that the ranks of a local run are bound to; unset: any."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the trainer computes."""
    omp_threads: int = Field(1, gt=0)
    """Threads per rank on CPU."""
    peak_flops: float = Field(0.0, ge=0)
    """Peak floating-point operations per second of one rank's device, e.g. 989e12 for an H100 in bfloat16;
    when set, `perf/mfu` is reported."""
    save_freq: int = Field(0, ge=0)
    """Policy versions between checkpoints; 0: only at the end and on an orderly stop."""
    save_interval_s: float = Field(0.0, ge=0)
    """Also checkpoint at the first commit after this many seconds without one; 0 turns it off."""
    save_timeout_s: float = Field(1800.0, gt=0)
    """Longest time to write a checkpoint; training continues meanwhile."""
    max_ckpt_to_keep: int = Field(2, gt=0)
    """Checkpoints kept; older ones are removed."""
    resume: str = "auto"
    """`auto`: from the newest checkpoint of the run, which is refused if damaged; `never`: start from
    scratch; a path: from that checkpoint of the run, setting newer ones aside."""
    claim_timeout_s: float = Field(1800.0, gt=0)
    """Longest wait for samples before the trainer stops with an error; the clock stops while no rollouter
    takes part."""
    max_skipped_updates: int = Field(5, gt=0)
    """Consecutive local updates with nothing finite after which the run stops with an error."""
    logger: list[str] = [CONSOLE]
    """Where the rows of `metrics.jsonl` and the held-out scores go in addition to the run's own files:
    `tensorboard` and `wandb` need `.venv/bin/pip install -e '.[logging]'`, others their own package;
    `console` is what the runner shows anyway."""
    project_name: str = "headrace"
    """Project in Weights & Biases; the run's `name` is its name there too."""

    @field_validator("logger")
    @classmethod
    def _known_trackers(cls, names: list[str]) -> list[str]:
        return [known_tracker(name) for name in names]


class ValConfig(Section):
    """Validation on held-out prompts."""

    n: Annotated[int, RUN] = Field(1, gt=0)
    """Responses per held-out prompt; with more than one, mean@n, best@n and maj@n are reported."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of validation; 0 is greedy."""

    max_delay_s: float = Field(120.0, ge=0)
    """How long the next commit waits for a running validation."""


class SyncConfig(Section):
    """Weight transfer. `gloo` works on CPU and, staged through the host, on CUDA; `nccl` needs CUDA."""

    transport: Annotated[str, AfterValidator(TRANSPORTS.checked)] = "gloo"
    """How weights are transferred: `gloo`, `nccl`, or one from an installed package."""
    bucket_bytes: int = Field(64 * 1024 * 1024, ge=1024)
    """Size of one broadcast."""
    pause_timeout_s: float = Field(30.0, gt=0)
    """A member that has not paused within this time is expired."""
    drain_stall_s: float = Field(60.0, gt=0)
    """A member that is finishing its running work is given up after this long without a token."""
    rendezvous_timeout_s: float = Field(60.0, gt=0)
    """Longest rendezvous of a new weight group."""
    transfer_timeout_s: float = Field(300.0, gt=0)
    """Longest transfer of all weights to all members."""
    max_attempts: int = Field(3, gt=0)
    """Attempts at one round before every member is expired."""
    canary_tolerance: float | None = Field(None, gt=0)
    """Largest log-prob difference accepted after a sync; beyond it the engine is not trusted and is
    restarted. Unset: 0.05 in float32, 1 in lower precision, where logits are rounded coarsely."""


class LedgerConfig(Section):
    """Leases and retries."""

    lease_s: float = Field(10.0, gt=0)
    """An owner without a heartbeat for this long has expired."""
    max_retries: int = Field(2, ge=0)
    """Failures (reward error, time-out) of one sample before it is dead."""
    max_crashes: int = Field(3, ge=0)
    """Owners that may expire over one sample before it is dead (a poison prompt)."""


class RedisConfig(Section):
    """The Redis server that holds the ledger."""

    url: Annotated[str | None, RUN_NOT_IN_LEDGER] = None
    """`redis://` or `rediss://` URL; unset: the runner starts the bundled Valkey server."""
    connect_timeout_s: float = Field(5.0, gt=0)
    """Longest single attempt to reach Redis at start. Services retry until their start times out
    (`services.start_timeout_s`); `headrace run` tries once, before it starts any."""
    allow_volatile: bool = False
    """Accept your own server without persistence: restarting it ends the run."""
    max_memory_bytes: int = Field(0, ge=0)
    """Memory limit of the bundled server; when it is reached, rollouters wait until something is trained;
    nothing is ever evicted. 0 for no limit. Your own server has its own `maxmemory`."""
    outage_timeout_s: float = Field(300.0, gt=0)
    """How long a running service waits for an unreachable Redis; meanwhile the run is paused and no owner
    expires. After that the service exits and is restarted."""

    @field_validator("url")
    @classmethod
    def _scheme(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("must start with redis://, rediss:// or unix://")
        return value


class TraceConfig(Section):
    """A timeline of the run for `headrace trace`."""

    enable: bool = False
    """Every process records its phases and samples under `trace/` in the run's directory; in a cluster, pods
    that do not mount it record through Redis."""
    max_events: int = Field(500_000, gt=0)
    """Most events that one process records."""


class ServicesConfig(Section):
    """Addresses, restarts and time limits of the services."""

    host: str = "127.0.0.1"
    """Address that a local run's services listen on."""
    queue_port: int = Field(0, ge=0, le=65535)
    """HTTP port of the queue service; 0 for a free one."""
    coordinator_port: int = Field(0, ge=0, le=65535)
    """gRPC port of the sync coordinator, for your own programs. After a crash of the coordinator another user
    can take the port and is sent the token. 0: a Unix socket in a directory that other users cannot enter."""
    max_restarts: int = Field(3, ge=0)
    """Restarts of one service before the run fails; the count resets after two minutes without one (for the
    trainer, only if it has saved a checkpoint since)."""
    start_timeout_s: float = Field(300.0, gt=0)
    """Longest start of any service, including its wait for Redis and for a run that is set up in it."""
    stop_timeout_s: float = Field(60.0, gt=0)
    """Longest orderly stop of any service."""


class RunConfig(Section):
    """Everything about a run."""

    name: Annotated[str, RUN_NOT_IN_LEDGER] = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")
    """Name of the run; also the namespace of its keys in Redis."""
    runs_dir: str = "runs"
    """The run's directory is `runs_dir/name`."""
    mode: Literal["one_step_off", "colocated_sync"] | None = None
    """The two modes that `async_training` alone does not express; unset: the mode follows from it. On GPUs,
    `colocated_sync` puts trainer and engines on the same ones."""
    seed: Annotated[int, RUN] = Field(0, ge=0)
    """Seed of all randomness: order of prompts, sampling, the demo's warm-up."""
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    actor: ActorConfig
    critic: CriticConfig = CriticConfig()
    ref: RefConfig = RefConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    async_training: AsyncTrainingConfig = AsyncTrainingConfig()
    trainer: TrainerConfig = TrainerConfig()
    custom_reward_function: CustomRewardConfig = CustomRewardConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    val: ValConfig = ValConfig()
    sync: SyncConfig = SyncConfig()
    ledger: LedgerConfig = LedgerConfig()
    redis: RedisConfig = RedisConfig()
    services: ServicesConfig = ServicesConfig()
    trace: TraceConfig = TraceConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    dump: DumpConfig = DumpConfig()

    @property
    def rule(self) -> StalenessRule:
        a = self.async_training
        return StalenessRule(
            sync_steps=a.trigger_parameter_sync_step,
            require_batches=a.require_batches,
            mini_batch=self.actor.ppo_mini_batch_size,
            threshold=a.staleness_threshold,
            partial_rollout=a.partial_rollout,
            max_version_gap=a.max_version_gap,
        )

    @property
    def derived_mode(self) -> Mode:
        """Return `mode`, or the mode that the parameters express."""
        return Mode(self.mode) if self.mode is not None else derive_mode(self.rule)

    @property
    def waits_for_commit(self) -> bool:
        """Whether the trainer waits for each sync round to finish, in modes defined by sync boundaries."""
        return self.mode is not None

    @property
    def gpu_sharing(self) -> Sharing | None:
        """Return how trainer and engines divide shared GPUs; None if they do not share any."""
        if self.mode != "colocated_sync" or self.trainer.device != "cuda":
            return None
        engine = self.rollout.engine
        return sharing(
            self.world_size, self.rollout.replicas, engine.tensor_parallel_size, engine.gpu_memory_utilization
        )

    @property
    def longest_sequence(self) -> int:
        """Return the most tokens of prompt and response together: the engines' `max_model_len`."""
        return self.model.max_model_len or self.data.max_prompt_length + self.data.max_response_length

    @property
    def recomputes_old(self) -> bool:
        """Whether the trainer keeps the window's first weights and computes old log-probs with them."""
        return not self.async_training.use_rollout_log_probs

    @property
    def uses_reference(self) -> bool:
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def has_greedy_baseline(self) -> bool:
        """Whether every group gets an additional greedy response."""
        return self.estimator.greedy_baseline

    @property
    def estimator(self) -> Estimator:
        """Raises ValueError if it is not imported yet: call `algorithm_checks.load_estimator` first."""
        found = estimator_of(self)
        if found is None:
            raise ValueError(f"{self.algorithm.adv_estimator} is not imported yet")
        return found

    @property
    def canary_limit(self) -> float:
        """Return `sync.canary_tolerance`, or the default for `model.dtype`."""
        if self.sync.canary_tolerance is not None:
            return self.sync.canary_tolerance
        return 0.05 if self.model.dtype == "float32" else 1.0

    @property
    def world_size(self) -> int:
        """Return the number of trainer ranks."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def samples_per_update(self) -> int:
        """R*M: samples per claim."""
        return self.async_training.require_batches * self.actor.ppo_mini_batch_size

    @property
    def optimizer_steps(self) -> int:
        """Return the optimizer steps of the whole run, assuming that every sample is trained."""
        return -(-self.rollout.total_rollout_steps // self.actor.ppo_mini_batch_size)

    @model_validator(mode="before")
    @classmethod
    def _mode_sets_parameters(cls, data: Any) -> Any:
        """Fill in the unset parameters that a mode defines."""
        mode = data.get("mode") if isinstance(data, dict) else None
        if not isinstance(mode, str) or mode not in MODE_PARAMETERS:
            return data
        given = data.get("async_training") or {}
        if not isinstance(given, dict):
            return data
        return {**data, "async_training": {**MODE_PARAMETERS[mode], **given}}

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        problems = list(cross_field_problems(self))
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def to_plain(self) -> dict[str, Any]:
        """Return the resolved configuration as plain data, with any password in `redis.url` masked."""
        plain = self.model_dump(mode="json")
        if self.redis.url:
            from headrace.config.redis_url import masked

            plain["redis"]["url"] = masked(self.redis.url)
        return plain
