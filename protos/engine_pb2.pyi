from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineCommand(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "finish")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submit: Submit
    cancel: Cancel
    finish: Finish
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("gateway_id", "incarnation", "stream_secret", "received_sequence")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STREAM_SECRET_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    incarnation: str
    stream_secret: str
    received_sequence: int
    def __init__(self, gateway_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., stream_secret: _Optional[str] = ..., received_sequence: _Optional[int] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_key", "prompt_token_ids", "sampling", "samples", "lease_id", "lease_blocks", "admission_class", "priority", "deadline_s", "cache_salt", "adapter", "request_id", "traceparent", "transfer", "tracestate")
    REQUEST_KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_CLASS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    request_key: str
    prompt_token_ids: bytes
    sampling: Sampling
    samples: _containers.RepeatedCompositeFieldContainer[SampleStart]
    lease_id: int
    lease_blocks: int
    admission_class: str
    priority: int
    deadline_s: float
    cache_salt: str
    adapter: str
    request_id: str
    traceparent: str
    transfer: Transfer
    tracestate: str
    def __init__(self, request_key: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., samples: _Optional[_Iterable[_Union[SampleStart, _Mapping]]] = ..., lease_id: _Optional[int] = ..., lease_blocks: _Optional[int] = ..., admission_class: _Optional[str] = ..., priority: _Optional[int] = ..., deadline_s: _Optional[float] = ..., cache_salt: _Optional[str] = ..., adapter: _Optional[str] = ..., request_id: _Optional[str] = ..., traceparent: _Optional[str] = ..., transfer: _Optional[_Union[Transfer, _Mapping]] = ..., tracestate: _Optional[str] = ...) -> None: ...

class Transfer(_message.Message):
    __slots__ = ("replica_id", "incarnation", "actors", "num_tokens", "timeout_s")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ACTORS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    incarnation: str
    actors: _containers.RepeatedScalarFieldContainer[str]
    num_tokens: int
    timeout_s: float
    def __init__(self, replica_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., actors: _Optional[_Iterable[str]] = ..., num_tokens: _Optional[int] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class SampleStart(_message.Message):
    __slots__ = ("index", "output_token_ids")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    index: int
    output_token_ids: bytes
    def __init__(self, index: _Optional[int] = ..., output_token_ids: _Optional[bytes] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "n", "stop_token_ids", "ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias_ids", "logit_bias_values", "logprobs", "prompt_logprobs", "beam_width", "length_penalty", "grammar")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BEAM_WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    n: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias_ids: _containers.RepeatedScalarFieldContainer[int]
    logit_bias_values: _containers.RepeatedScalarFieldContainer[float]
    logprobs: int
    prompt_logprobs: int
    beam_width: int
    length_penalty: float
    grammar: str
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., n: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias_ids: _Optional[_Iterable[int]] = ..., logit_bias_values: _Optional[_Iterable[float]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., beam_width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., grammar: _Optional[str] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_key",)
    REQUEST_KEY_FIELD_NUMBER: _ClassVar[int]
    request_key: str
    def __init__(self, request_key: _Optional[str] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("request_key", "index", "num_tokens")
    REQUEST_KEY_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_key: str
    index: int
    num_tokens: int
    def __init__(self, request_key: _Optional[str] = ..., index: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class EngineOutputs(_message.Message):
    __slots__ = ("step", "deltas", "sequence", "attached")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    step: int
    deltas: _containers.RepeatedCompositeFieldContainer[Delta]
    sequence: int
    attached: Attached
    def __init__(self, step: _Optional[int] = ..., deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ..., sequence: _Optional[int] = ..., attached: _Optional[_Union[Attached, _Mapping]] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("kept",)
    KEPT_FIELD_NUMBER: _ClassVar[int]
    kept: bool
    def __init__(self, kept: bool = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("request_key", "index", "first_position", "token_ids", "logprobs", "prompt_logprobs", "finish_reason", "usage", "error", "error_class", "score")
    REQUEST_KEY_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_CLASS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    request_key: str
    index: int
    first_position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[Logprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[Logprobs]
    finish_reason: str
    usage: Usage
    error: str
    error_class: str
    score: float
    def __init__(self, request_key: _Optional[str] = ..., index: _Optional[int] = ..., first_position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[Logprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[Logprobs, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., error: _Optional[str] = ..., error_class: _Optional[str] = ..., score: _Optional[float] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("token_ids", "values", "rank")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    rank: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[float]] = ..., rank: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "completion_tokens", "preemptions", "queued_s", "prefill_s", "decode_s")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    preemptions: int
    queued_s: float
    prefill_s: float
    decode_s: float
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., queued_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., decode_s: _Optional[float] = ...) -> None: ...
