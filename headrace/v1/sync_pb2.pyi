from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorMeta(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class TransferUnit(_message.Message):
    __slots__ = ("tensors", "bytes")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorMeta]
    bytes: int
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorMeta, _Mapping]]] = ..., bytes: _Optional[int] = ...) -> None: ...

class Canary(_message.Message):
    __slots__ = ("token_ids", "log_probs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("units", "bucket_bytes", "bytes", "canary", "version")
    UNITS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    units: _containers.RepeatedCompositeFieldContainer[TransferUnit]
    bucket_bytes: int
    bytes: int
    canary: Canary
    version: int
    def __init__(self, units: _Optional[_Iterable[_Union[TransferUnit, _Mapping]]] = ..., bucket_bytes: _Optional[int] = ..., bytes: _Optional[int] = ..., canary: _Optional[_Union[Canary, _Mapping]] = ..., version: _Optional[int] = ...) -> None: ...

class Rendezvous(_message.Message):
    __slots__ = ("host", "port", "epoch", "world_size", "transport", "timeout_s")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    epoch: int
    world_size: int
    transport: str
    timeout_s: float
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., epoch: _Optional[int] = ..., world_size: _Optional[int] = ..., transport: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class MemberReport(_message.Message):
    __slots__ = ("hello", "paused", "ready", "loaded", "failed", "progress", "resumed", "leaving")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    hello: MemberHello
    paused: MemberPaused
    ready: MemberReady
    loaded: MemberLoaded
    failed: MemberFailed
    progress: MemberProgress
    resumed: MemberResumed
    leaving: MemberLeaving
    def __init__(self, hello: _Optional[_Union[MemberHello, _Mapping]] = ..., paused: _Optional[_Union[MemberPaused, _Mapping]] = ..., ready: _Optional[_Union[MemberReady, _Mapping]] = ..., loaded: _Optional[_Union[MemberLoaded, _Mapping]] = ..., failed: _Optional[_Union[MemberFailed, _Mapping]] = ..., progress: _Optional[_Union[MemberProgress, _Mapping]] = ..., resumed: _Optional[_Union[MemberResumed, _Mapping]] = ..., leaving: _Optional[_Union[MemberLeaving, _Mapping]] = ...) -> None: ...

class MemberHello(_message.Message):
    __slots__ = ("incarnation", "workers", "version", "paused", "nccl")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    NCCL_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    workers: int
    version: int
    paused: bool
    nccl: str
    def __init__(self, incarnation: _Optional[str] = ..., workers: _Optional[int] = ..., version: _Optional[int] = ..., paused: _Optional[bool] = ..., nccl: _Optional[str] = ...) -> None: ...

class MemberPaused(_message.Message):
    __slots__ = ("term", "round")
    TERM_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    term: int
    round: int
    def __init__(self, term: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class MemberReady(_message.Message):
    __slots__ = ("term", "session")
    TERM_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    term: int
    session: int
    def __init__(self, term: _Optional[int] = ..., session: _Optional[int] = ...) -> None: ...

class MemberLoaded(_message.Message):
    __slots__ = ("term", "session", "digest", "load_s")
    TERM_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    term: int
    session: int
    digest: str
    load_s: float
    def __init__(self, term: _Optional[int] = ..., session: _Optional[int] = ..., digest: _Optional[str] = ..., load_s: _Optional[float] = ...) -> None: ...

class MemberFailed(_message.Message):
    __slots__ = ("term", "session", "error")
    TERM_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    term: int
    session: int
    error: str
    def __init__(self, term: _Optional[int] = ..., session: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class MemberProgress(_message.Message):
    __slots__ = ("tokens", "running")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    running: int
    def __init__(self, tokens: _Optional[int] = ..., running: _Optional[int] = ...) -> None: ...

class MemberResumed(_message.Message):
    __slots__ = ("version", "canary_max_abs_diff")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CANARY_MAX_ABS_DIFF_FIELD_NUMBER: _ClassVar[int]
    version: int
    canary_max_abs_diff: float
    def __init__(self, version: _Optional[int] = ..., canary_max_abs_diff: _Optional[float] = ...) -> None: ...

class MemberLeaving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MemberCommand(_message.Message):
    __slots__ = ("term", "welcome", "pause", "join", "load", "resume", "expelled")
    TERM_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    EXPELLED_FIELD_NUMBER: _ClassVar[int]
    term: int
    welcome: MemberWelcome
    pause: MemberPause
    join: JoinGroup
    load: Load
    resume: Resume
    expelled: Expelled
    def __init__(self, term: _Optional[int] = ..., welcome: _Optional[_Union[MemberWelcome, _Mapping]] = ..., pause: _Optional[_Union[MemberPause, _Mapping]] = ..., join: _Optional[_Union[JoinGroup, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., expelled: _Optional[_Union[Expelled, _Mapping]] = ...) -> None: ...

class MemberWelcome(_message.Message):
    __slots__ = ("committed_version",)
    COMMITTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    committed_version: int
    def __init__(self, committed_version: _Optional[int] = ...) -> None: ...

class MemberPause(_message.Message):
    __slots__ = ("round", "finish_through", "drop_work")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FINISH_THROUGH_FIELD_NUMBER: _ClassVar[int]
    DROP_WORK_FIELD_NUMBER: _ClassVar[int]
    round: int
    finish_through: int
    drop_work: bool
    def __init__(self, round: _Optional[int] = ..., finish_through: _Optional[int] = ..., drop_work: _Optional[bool] = ...) -> None: ...

class JoinGroup(_message.Message):
    __slots__ = ("session", "rendezvous", "rank_offset")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    RANK_OFFSET_FIELD_NUMBER: _ClassVar[int]
    session: int
    rendezvous: Rendezvous
    rank_offset: int
    def __init__(self, session: _Optional[int] = ..., rendezvous: _Optional[_Union[Rendezvous, _Mapping]] = ..., rank_offset: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("session", "manifest")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    session: int
    manifest: Manifest
    def __init__(self, session: _Optional[int] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("version", "canary")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    version: int
    canary: Canary
    def __init__(self, version: _Optional[int] = ..., canary: _Optional[_Union[Canary, _Mapping]] = ...) -> None: ...

class Expelled(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class TrainerReport(_message.Message):
    __slots__ = ("hello", "begin", "ready", "sent", "failed")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    hello: TrainerHello
    begin: BeginSync
    ready: TrainerReady
    sent: TrainerSent
    failed: TrainerFailed
    def __init__(self, hello: _Optional[_Union[TrainerHello, _Mapping]] = ..., begin: _Optional[_Union[BeginSync, _Mapping]] = ..., ready: _Optional[_Union[TrainerReady, _Mapping]] = ..., sent: _Optional[_Union[TrainerSent, _Mapping]] = ..., failed: _Optional[_Union[TrainerFailed, _Mapping]] = ...) -> None: ...

class TrainerHello(_message.Message):
    __slots__ = ("lineage", "store_host", "store_port", "snapshot_version", "manifest", "nccl")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STORE_HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    NCCL_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    store_host: str
    store_port: int
    snapshot_version: int
    manifest: Manifest
    nccl: str
    def __init__(self, lineage: _Optional[int] = ..., store_host: _Optional[str] = ..., store_port: _Optional[int] = ..., snapshot_version: _Optional[int] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ..., nccl: _Optional[str] = ...) -> None: ...

class BeginSync(_message.Message):
    __slots__ = ("lineage", "optimizer_step", "version", "manifest", "validate", "final", "wait_s", "step_s", "tuning")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    TUNING_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    optimizer_step: int
    version: int
    manifest: Manifest
    validate: bool
    final: bool
    wait_s: float
    step_s: float
    tuning: Tuning
    def __init__(self, lineage: _Optional[int] = ..., optimizer_step: _Optional[int] = ..., version: _Optional[int] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ..., validate: _Optional[bool] = ..., final: _Optional[bool] = ..., wait_s: _Optional[float] = ..., step_s: _Optional[float] = ..., tuning: _Optional[_Union[Tuning, _Mapping]] = ...) -> None: ...

class TrainerReady(_message.Message):
    __slots__ = ("term", "session")
    TERM_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    term: int
    session: int
    def __init__(self, term: _Optional[int] = ..., session: _Optional[int] = ...) -> None: ...

class TrainerSent(_message.Message):
    __slots__ = ("term", "session", "digest", "transfer_s")
    TERM_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    term: int
    session: int
    digest: str
    transfer_s: float
    def __init__(self, term: _Optional[int] = ..., session: _Optional[int] = ..., digest: _Optional[str] = ..., transfer_s: _Optional[float] = ...) -> None: ...

class TrainerFailed(_message.Message):
    __slots__ = ("term", "session", "error", "moved_on")
    TERM_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MOVED_ON_FIELD_NUMBER: _ClassVar[int]
    term: int
    session: int
    error: str
    moved_on: bool
    def __init__(self, term: _Optional[int] = ..., session: _Optional[int] = ..., error: _Optional[str] = ..., moved_on: _Optional[bool] = ...) -> None: ...

class TrainerCommand(_message.Message):
    __slots__ = ("term", "welcome", "form", "send", "committed", "rejected", "canary", "tuning")
    TERM_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    SEND_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    TUNING_FIELD_NUMBER: _ClassVar[int]
    term: int
    welcome: TrainerWelcome
    form: FormGroup
    send: Send
    committed: Committed
    rejected: Rejected
    canary: CanaryReport
    tuning: Tuning
    def __init__(self, term: _Optional[int] = ..., welcome: _Optional[_Union[TrainerWelcome, _Mapping]] = ..., form: _Optional[_Union[FormGroup, _Mapping]] = ..., send: _Optional[_Union[Send, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., canary: _Optional[_Union[CanaryReport, _Mapping]] = ..., tuning: _Optional[_Union[Tuning, _Mapping]] = ...) -> None: ...

class TrainerWelcome(_message.Message):
    __slots__ = ("committed_version", "tuning")
    COMMITTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    TUNING_FIELD_NUMBER: _ClassVar[int]
    committed_version: int
    tuning: Tuning
    def __init__(self, committed_version: _Optional[int] = ..., tuning: _Optional[_Union[Tuning, _Mapping]] = ...) -> None: ...

class Tuning(_message.Message):
    __slots__ = ("sync_steps", "staleness_threshold")
    SYNC_STEPS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    sync_steps: int
    staleness_threshold: float
    def __init__(self, sync_steps: _Optional[int] = ..., staleness_threshold: _Optional[float] = ...) -> None: ...

class FormGroup(_message.Message):
    __slots__ = ("session", "rendezvous")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    session: int
    rendezvous: Rendezvous
    def __init__(self, session: _Optional[int] = ..., rendezvous: _Optional[_Union[Rendezvous, _Mapping]] = ...) -> None: ...

class Send(_message.Message):
    __slots__ = ("session", "version")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    session: int
    version: int
    def __init__(self, session: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("version", "round", "pause_s", "transfer_s", "commit_s", "total_s", "members", "attempts")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    COMMIT_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    version: int
    round: int
    pause_s: float
    transfer_s: float
    commit_s: float
    total_s: float
    members: int
    attempts: int
    def __init__(self, version: _Optional[int] = ..., round: _Optional[int] = ..., pause_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., commit_s: _Optional[float] = ..., total_s: _Optional[float] = ..., members: _Optional[int] = ..., attempts: _Optional[int] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class CanaryReport(_message.Message):
    __slots__ = ("version", "incarnation", "max_abs_diff")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MAX_ABS_DIFF_FIELD_NUMBER: _ClassVar[int]
    version: int
    incarnation: str
    max_abs_diff: float
    def __init__(self, version: _Optional[int] = ..., incarnation: _Optional[str] = ..., max_abs_diff: _Optional[float] = ...) -> None: ...

class NodeReport(_message.Message):
    __slots__ = ("hello", "ended")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    hello: NodeHello
    ended: NodeEnded
    def __init__(self, hello: _Optional[_Union[NodeHello, _Mapping]] = ..., ended: _Optional[_Union[NodeEnded, _Mapping]] = ...) -> None: ...

class NodeHello(_message.Message):
    __slots__ = ("node", "nodes", "launch", "store")
    NODE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    node: str
    nodes: int
    launch: str
    store: str
    def __init__(self, node: _Optional[str] = ..., nodes: _Optional[int] = ..., launch: _Optional[str] = ..., store: _Optional[str] = ...) -> None: ...

class NodeEnded(_message.Message):
    __slots__ = ("code",)
    CODE_FIELD_NUMBER: _ClassVar[int]
    code: int
    def __init__(self, code: _Optional[int] = ...) -> None: ...

class NodeCommand(_message.Message):
    __slots__ = ("wait", "start", "stop")
    WAIT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    wait: NodeWait
    start: NodeStart
    stop: NodeStop
    def __init__(self, wait: _Optional[_Union[NodeWait, _Mapping]] = ..., start: _Optional[_Union[NodeStart, _Mapping]] = ..., stop: _Optional[_Union[NodeStop, _Mapping]] = ...) -> None: ...

class NodeWait(_message.Message):
    __slots__ = ("present", "nodes")
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    present: _containers.RepeatedScalarFieldContainer[str]
    nodes: int
    def __init__(self, present: _Optional[_Iterable[str]] = ..., nodes: _Optional[int] = ...) -> None: ...

class NodeStart(_message.Message):
    __slots__ = ("launch", "number", "store")
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    launch: str
    number: int
    store: str
    def __init__(self, launch: _Optional[str] = ..., number: _Optional[int] = ..., store: _Optional[str] = ...) -> None: ...

class NodeStop(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusReply(_message.Message):
    __slots__ = ("term", "round", "phase", "version", "members", "joiners", "trainer_connected", "waiting_for")
    TERM_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    JOINERS_FIELD_NUMBER: _ClassVar[int]
    TRAINER_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    term: int
    round: int
    phase: str
    version: int
    members: _containers.RepeatedScalarFieldContainer[str]
    joiners: _containers.RepeatedScalarFieldContainer[str]
    trainer_connected: bool
    waiting_for: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, term: _Optional[int] = ..., round: _Optional[int] = ..., phase: _Optional[str] = ..., version: _Optional[int] = ..., members: _Optional[_Iterable[str]] = ..., joiners: _Optional[_Iterable[str]] = ..., trainer_connected: _Optional[bool] = ..., waiting_for: _Optional[_Iterable[str]] = ...) -> None: ...
