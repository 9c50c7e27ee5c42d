from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "token_ids", "chat", "sampling", "cache_salt", "admission_class", "priority", "request_id", "resume_token_ids", "add_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_CLASS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    token_ids: TokenIds
    chat: Chat
    sampling: Sampling
    cache_salt: str
    admission_class: str
    priority: int
    request_id: str
    resume_token_ids: _containers.RepeatedScalarFieldContainer[int]
    add_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., cache_salt: _Optional[str] = ..., admission_class: _Optional[str] = ..., priority: _Optional[int] = ..., request_id: _Optional[str] = ..., resume_token_ids: _Optional[_Iterable[int]] = ..., add_special_tokens: bool = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "n", "stop", "stop_token_ids", "ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "prompt_logprobs", "skip_special_tokens", "response_format", "beam_width", "length_penalty")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    BEAM_WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    n: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    prompt_logprobs: int
    skip_special_tokens: bool
    response_format: ResponseFormat
    beam_width: int
    length_penalty: float
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., n: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., skip_special_tokens: bool = ..., response_format: _Optional[_Union[ResponseFormat, _Mapping]] = ..., beam_width: _Optional[int] = ..., length_penalty: _Optional[float] = ...) -> None: ...

class ResponseFormat(_message.Message):
    __slots__ = ("json_object", "json_schema", "regex", "grammar")
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    json_object: bool
    json_schema: str
    regex: str
    grammar: str
    def __init__(self, json_object: bool = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("index", "token_ids", "text", "logprobs", "finish_reason", "usage", "score")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: str
    usage: Usage
    score: float
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., score: _Optional[float] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "model", "outputs", "seed", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    outputs: _containers.RepeatedCompositeFieldContainer[Output]
    seed: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., outputs: _Optional[_Iterable[_Union[Output, _Mapping]]] = ..., seed: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("admission_s", "queued_s", "prefill_s", "decode_s", "first_token_s", "total_s")
    ADMISSION_S_FIELD_NUMBER: _ClassVar[int]
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    admission_s: float
    queued_s: float
    prefill_s: float
    decode_s: float
    first_token_s: float
    total_s: float
    def __init__(self, admission_s: _Optional[float] = ..., queued_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., first_token_s: _Optional[float] = ..., total_s: _Optional[float] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "completion_tokens", "preemptions", "replica", "timings", "resumes")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    preemptions: int
    replica: str
    timings: Timings
    resumes: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., replica: _Optional[str] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., resumes: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "add_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: Chat
    add_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., add_special_tokens: bool = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("model", "token_ids", "max_context")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_context: int
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., max_context: _Optional[int] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids", "skip_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: bool = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("model", "text")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Model(_message.Message):
    __slots__ = ("id", "aliases", "max_context", "vocab_size", "block_size", "eos_token_ids", "bos_token_id", "has_chat_template")
    ID_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    id: str
    aliases: _containers.RepeatedScalarFieldContainer[str]
    max_context: int
    vocab_size: int
    block_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token_id: int
    has_chat_template: bool
    def __init__(self, id: _Optional[str] = ..., aliases: _Optional[_Iterable[str]] = ..., max_context: _Optional[int] = ..., vocab_size: _Optional[int] = ..., block_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., bos_token_id: _Optional[int] = ..., has_chat_template: bool = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class GetClusterStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TierState(_message.Message):
    __slots__ = ("clean", "cached_idle", "referenced", "fenced", "total")
    CLEAN_FIELD_NUMBER: _ClassVar[int]
    CACHED_IDLE_FIELD_NUMBER: _ClassVar[int]
    REFERENCED_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    clean: int
    cached_idle: int
    referenced: int
    fenced: int
    total: int
    def __init__(self, clean: _Optional[int] = ..., cached_idle: _Optional[int] = ..., referenced: _Optional[int] = ..., fenced: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class ReplicaState(_message.Message):
    __slots__ = ("replica_id", "incarnation", "model", "state", "device", "host", "num_running", "num_waiting", "leased_blocks", "available_blocks", "query_tokens", "hit_tokens", "preemptions", "report_age_s", "node_id", "draft_tokens", "accepted_tokens", "weights_version", "transfers_offered", "transfers_done", "transfers_failed", "transferred_bytes", "transfer_s")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    REPORT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_OFFERED_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_DONE_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FAILED_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    incarnation: str
    model: str
    state: str
    device: TierState
    host: TierState
    num_running: int
    num_waiting: int
    leased_blocks: int
    available_blocks: int
    query_tokens: int
    hit_tokens: int
    preemptions: int
    report_age_s: float
    node_id: str
    draft_tokens: int
    accepted_tokens: int
    weights_version: int
    transfers_offered: int
    transfers_done: int
    transfers_failed: int
    transferred_bytes: int
    transfer_s: float
    def __init__(self, replica_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., model: _Optional[str] = ..., state: _Optional[str] = ..., device: _Optional[_Union[TierState, _Mapping]] = ..., host: _Optional[_Union[TierState, _Mapping]] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., available_blocks: _Optional[int] = ..., query_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., report_age_s: _Optional[float] = ..., node_id: _Optional[str] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., weights_version: _Optional[int] = ..., transfers_offered: _Optional[int] = ..., transfers_done: _Optional[int] = ..., transfers_failed: _Optional[int] = ..., transferred_bytes: _Optional[int] = ..., transfer_s: _Optional[float] = ...) -> None: ...

class GetClusterStateResponse(_message.Message):
    __slots__ = ("replicas", "queued_requests", "queued_tokens", "granted", "refused", "expired", "policy", "uptime_s")
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaState]
    queued_requests: int
    queued_tokens: int
    granted: int
    refused: int
    expired: int
    policy: str
    uptime_s: float
    def __init__(self, replicas: _Optional[_Iterable[_Union[ReplicaState, _Mapping]]] = ..., queued_requests: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., granted: _Optional[int] = ..., refused: _Optional[int] = ..., expired: _Optional[int] = ..., policy: _Optional[str] = ..., uptime_s: _Optional[float] = ...) -> None: ...

class WatchClusterRequest(_message.Message):
    __slots__ = ("period_s",)
    PERIOD_S_FIELD_NUMBER: _ClassVar[int]
    period_s: float
    def __init__(self, period_s: _Optional[float] = ...) -> None: ...

class PoolMap(_message.Message):
    __slots__ = ("replica_id", "tier", "num_blocks", "cells")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    tier: str
    num_blocks: int
    cells: bytes
    def __init__(self, replica_id: _Optional[str] = ..., tier: _Optional[str] = ..., num_blocks: _Optional[int] = ..., cells: _Optional[bytes] = ...) -> None: ...

class WaitingState(_message.Message):
    __slots__ = ("request_key", "request_id", "tenant", "model", "admission_class", "priority", "num_tokens", "num_blocks", "waited_s")
    REQUEST_KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_CLASS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    request_key: str
    request_id: str
    tenant: str
    model: str
    admission_class: str
    priority: int
    num_tokens: int
    num_blocks: int
    waited_s: float
    def __init__(self, request_key: _Optional[str] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., admission_class: _Optional[str] = ..., priority: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., waited_s: _Optional[float] = ...) -> None: ...

class LeaseState(_message.Message):
    __slots__ = ("lease_id", "replica_id", "request_key", "request_id", "tenant", "admission_class", "num_blocks", "remaining_blocks", "age_s", "accepted")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_CLASS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    replica_id: str
    request_key: str
    request_id: str
    tenant: str
    admission_class: str
    num_blocks: int
    remaining_blocks: int
    age_s: float
    accepted: bool
    def __init__(self, lease_id: _Optional[int] = ..., replica_id: _Optional[str] = ..., request_key: _Optional[str] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., admission_class: _Optional[str] = ..., num_blocks: _Optional[int] = ..., remaining_blocks: _Optional[int] = ..., age_s: _Optional[float] = ..., accepted: bool = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("number", "age_s", "request_key", "request_id", "tenant", "model", "decision", "reason", "replica_id", "num_tokens", "hit_tokens", "lease_blocks", "waited_s", "replicas")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    REQUEST_KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEASE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    number: int
    age_s: float
    request_key: str
    request_id: str
    tenant: str
    model: str
    decision: str
    reason: str
    replica_id: str
    num_tokens: int
    hit_tokens: int
    lease_blocks: int
    waited_s: float
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaExplanation]
    def __init__(self, number: _Optional[int] = ..., age_s: _Optional[float] = ..., request_key: _Optional[str] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., decision: _Optional[str] = ..., reason: _Optional[str] = ..., replica_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., lease_blocks: _Optional[int] = ..., waited_s: _Optional[float] = ..., replicas: _Optional[_Iterable[_Union[ReplicaExplanation, _Mapping]]] = ...) -> None: ...

class PrefixNode(_message.Message):
    __slots__ = ("model", "tenant", "parent", "label", "num_tokens", "num_requests", "num_device_replicas", "num_host_replicas")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICE_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    model: str
    tenant: str
    parent: int
    label: str
    num_tokens: int
    num_requests: int
    num_device_replicas: int
    num_host_replicas: int
    def __init__(self, model: _Optional[str] = ..., tenant: _Optional[str] = ..., parent: _Optional[int] = ..., label: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_requests: _Optional[int] = ..., num_device_replicas: _Optional[int] = ..., num_host_replicas: _Optional[int] = ...) -> None: ...

class RecentRates(_message.Message):
    __slots__ = ("window_s", "tokens_per_s", "requests_per_s", "ttft_p50_s", "ttft_p99_s", "query_tokens", "hit_tokens")
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_P50_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_P99_S_FIELD_NUMBER: _ClassVar[int]
    QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    window_s: float
    tokens_per_s: float
    requests_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    query_tokens: int
    hit_tokens: int
    def __init__(self, window_s: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., requests_per_s: _Optional[float] = ..., ttft_p50_s: _Optional[float] = ..., ttft_p99_s: _Optional[float] = ..., query_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ...) -> None: ...

class ClusterUpdate(_message.Message):
    __slots__ = ("state", "pools", "waiting", "leases", "num_leases", "decisions", "prefixes", "rates")
    STATE_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    state: GetClusterStateResponse
    pools: _containers.RepeatedCompositeFieldContainer[PoolMap]
    waiting: _containers.RepeatedCompositeFieldContainer[WaitingState]
    leases: _containers.RepeatedCompositeFieldContainer[LeaseState]
    num_leases: int
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    prefixes: _containers.RepeatedCompositeFieldContainer[PrefixNode]
    rates: RecentRates
    def __init__(self, state: _Optional[_Union[GetClusterStateResponse, _Mapping]] = ..., pools: _Optional[_Iterable[_Union[PoolMap, _Mapping]]] = ..., waiting: _Optional[_Iterable[_Union[WaitingState, _Mapping]]] = ..., leases: _Optional[_Iterable[_Union[LeaseState, _Mapping]]] = ..., num_leases: _Optional[int] = ..., decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ..., prefixes: _Optional[_Iterable[_Union[PrefixNode, _Mapping]]] = ..., rates: _Optional[_Union[RecentRates, _Mapping]] = ...) -> None: ...

class ReplicaExplanation(_message.Message):
    __slots__ = ("replica_id", "eligible", "hit_tokens", "host_hit_tokens", "available_blocks", "prefill_ms", "load_ms", "queue_ms", "blocks_ms", "batch_ms", "affinity_ms", "total_ms", "transfer_ms", "transfer_tokens", "transfer_from")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ELIGIBLE_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_MS_FIELD_NUMBER: _ClassVar[int]
    BATCH_MS_FIELD_NUMBER: _ClassVar[int]
    AFFINITY_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FROM_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    eligible: bool
    hit_tokens: int
    host_hit_tokens: int
    available_blocks: int
    prefill_ms: float
    load_ms: float
    queue_ms: float
    blocks_ms: float
    batch_ms: float
    affinity_ms: float
    total_ms: float
    transfer_ms: float
    transfer_tokens: int
    transfer_from: str
    def __init__(self, replica_id: _Optional[str] = ..., eligible: bool = ..., hit_tokens: _Optional[int] = ..., host_hit_tokens: _Optional[int] = ..., available_blocks: _Optional[int] = ..., prefill_ms: _Optional[float] = ..., load_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., blocks_ms: _Optional[float] = ..., batch_ms: _Optional[float] = ..., affinity_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., transfer_tokens: _Optional[int] = ..., transfer_from: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("model", "prompt_tokens", "policy", "decision", "reason", "replica_id", "lease_blocks", "expected_output_tokens", "expected_wait_s", "queue_position", "replicas")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt_tokens: int
    policy: str
    decision: str
    reason: str
    replica_id: str
    lease_blocks: int
    expected_output_tokens: int
    expected_wait_s: float
    queue_position: int
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaExplanation]
    def __init__(self, model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., policy: _Optional[str] = ..., decision: _Optional[str] = ..., reason: _Optional[str] = ..., replica_id: _Optional[str] = ..., lease_blocks: _Optional[int] = ..., expected_output_tokens: _Optional[int] = ..., expected_wait_s: _Optional[float] = ..., queue_position: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[ReplicaExplanation, _Mapping]]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("num_cancelled",)
    NUM_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    num_cancelled: int
    def __init__(self, num_cancelled: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("replica_id", "drain_s")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    drain_s: float
    def __init__(self, replica_id: _Optional[str] = ..., drain_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[CacheReset]
    def __init__(self, replicas: _Optional[_Iterable[_Union[CacheReset, _Mapping]]] = ...) -> None: ...

class CacheReset(_message.Message):
    __slots__ = ("replica_id", "num_blocks", "epoch")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    num_blocks: int
    epoch: int
    def __init__(self, replica_id: _Optional[str] = ..., num_blocks: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("model", "checkpoint", "drain_s")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    model: str
    checkpoint: str
    drain_s: float
    def __init__(self, model: _Optional[str] = ..., checkpoint: _Optional[str] = ..., drain_s: _Optional[float] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("weights_version",)
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    weights_version: int
    def __init__(self, weights_version: _Optional[int] = ...) -> None: ...
