from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TURN_LIMIT: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TURN_LIMIT: FinishReason

class Prompt(_message.Message):
    __slots__ = ("sample_id", "issue", "epoch", "row", "prompt_token_ids", "data_source", "ground_truth", "extra_info_json")
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    ISSUE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DATA_SOURCE_FIELD_NUMBER: _ClassVar[int]
    GROUND_TRUTH_FIELD_NUMBER: _ClassVar[int]
    EXTRA_INFO_JSON_FIELD_NUMBER: _ClassVar[int]
    sample_id: str
    issue: int
    epoch: int
    row: int
    prompt_token_ids: bytes
    data_source: str
    ground_truth: str
    extra_info_json: str
    def __init__(self, sample_id: _Optional[str] = ..., issue: _Optional[int] = ..., epoch: _Optional[int] = ..., row: _Optional[int] = ..., prompt_token_ids: _Optional[bytes] = ..., data_source: _Optional[str] = ..., ground_truth: _Optional[str] = ..., extra_info_json: _Optional[str] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("version", "start", "end")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    version: int
    start: int
    end: int
    def __init__(self, version: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Trajectory(_message.Message):
    __slots__ = ("response_token_ids", "behaviour_log_probs", "loss_mask", "segments", "temperature", "finish_reason", "reward", "reward_parts", "turn_ends", "environment_state_json", "environment_metrics")
    class RewardPartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class EnvironmentMetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RESPONSE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOUR_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_PARTS_FIELD_NUMBER: _ClassVar[int]
    TURN_ENDS_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_STATE_JSON_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_METRICS_FIELD_NUMBER: _ClassVar[int]
    response_token_ids: bytes
    behaviour_log_probs: bytes
    loss_mask: bytes
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    temperature: float
    finish_reason: FinishReason
    reward: float
    reward_parts: _containers.ScalarMap[str, float]
    turn_ends: _containers.RepeatedScalarFieldContainer[int]
    environment_state_json: str
    environment_metrics: _containers.ScalarMap[str, float]
    def __init__(self, response_token_ids: _Optional[bytes] = ..., behaviour_log_probs: _Optional[bytes] = ..., loss_mask: _Optional[bytes] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., temperature: _Optional[float] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., reward: _Optional[float] = ..., reward_parts: _Optional[_Mapping[str, float]] = ..., turn_ends: _Optional[_Iterable[int]] = ..., environment_state_json: _Optional[str] = ..., environment_metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("prompt", "trajectories", "owner", "attempt", "generate_s", "reward_s", "baseline_reward")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GENERATE_S_FIELD_NUMBER: _ClassVar[int]
    REWARD_S_FIELD_NUMBER: _ClassVar[int]
    BASELINE_REWARD_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    trajectories: _containers.RepeatedCompositeFieldContainer[Trajectory]
    owner: str
    attempt: int
    generate_s: float
    reward_s: float
    baseline_reward: float
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., trajectories: _Optional[_Iterable[_Union[Trajectory, _Mapping]]] = ..., owner: _Optional[str] = ..., attempt: _Optional[int] = ..., generate_s: _Optional[float] = ..., reward_s: _Optional[float] = ..., baseline_reward: _Optional[float] = ...) -> None: ...

class ParkedGroup(_message.Message):
    __slots__ = ("trajectories",)
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    trajectories: _containers.RepeatedCompositeFieldContainer[Trajectory]
    def __init__(self, trajectories: _Optional[_Iterable[_Union[Trajectory, _Mapping]]] = ...) -> None: ...

class ValidationResult(_message.Message):
    __slots__ = ("version", "row", "data_source", "reward", "response_tokens", "answer")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    DATA_SOURCE_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    version: int
    row: int
    data_source: str
    reward: float
    response_tokens: int
    answer: str
    def __init__(self, version: _Optional[int] = ..., row: _Optional[int] = ..., data_source: _Optional[str] = ..., reward: _Optional[float] = ..., response_tokens: _Optional[int] = ..., answer: _Optional[str] = ...) -> None: ...
