"""The frozen values that cross a border between processes or folders.

Gateway, controller and replicas speak in these; `codec` turns those of the data plane into
protobuf and back. Nothing here decides anything. Lengths are in tokens, sizes in blocks, times
in seconds unless a name says otherwise. Points in time never cross a process: durations do.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class AdmissionClass(StrEnum):
    """What a lease promises: all of the worst case, a likely size, or nothing."""

    GUARANTEED = "guaranteed"
    STANDARD = "standard"
    BEST_EFFORT = "best-effort"


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # EOS, a stop token, or a stop string
    LENGTH = "length"  # max_tokens or the model's context
    KV_EXHAUSTED = "kv_exhausted"  # alone, and still outgrew the pool
    ABORT = "abort"  # cancelled, or its client went away
    DEADLINE = "deadline"  # its deadline passed
    ERROR = "error"  # the engine could not go on with it; see the delta's `error`


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Defaults are the neutral values; `validate` refuses the absurd.

    seed: None until the gateway draws one; an engine only ever sees an integer (uint64).
    max_tokens: None = up to the model's context; 0 = prefill only (prompt logprobs, warm-up).
    top_k: 0 = off. logprobs: None = none, 0 = of the sampled token only, k = also the k best.
    stop: strings; the gateway matches them, engines never see text.
    grammar: what the output must match, in llguidance's words (Lark, or its JSON); empty = none.
    beam_width: 0 or 1 = sample; more = beam search of so many beams, whose n best hypotheses by
    sum of log-probabilities / length ** length_penalty are told at the end.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    grammar: str = ""
    beam_width: int = 0
    length_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class SampleStart:
    """One of a request's `n` samples: where it begins. A resumed sample brings what it has said."""

    index: int
    output_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TransferPeer:
    """A replica with which blocks can be exchanged.

    actors: names of its ranks' actors, the leader's first.
    """

    replica_id: str
    incarnation: str
    actors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PrefixTransfer:
    """Where a prefix may be copied from, so that it need not be computed.

    num_tokens: from the first on, that the source holds. timeout_s: computing them would have
    been better than to wait any longer.
    """

    source: TransferPeer
    num_tokens: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What one incarnation has fetched from other replicas so far, and how fast.

    done, failed: transfers. blocks: published. num_bytes: of each rank; seconds: that all of it
    took, from the order to the last byte. bytes_per_s, overhead_s: running means of how fast each
    rank reads, and of what a transfer takes besides; 0 = not measured yet.
    """

    done: int = 0
    failed: int = 0
    blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    bytes_per_s: float = 0.0
    overhead_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TraceContext:
    """W3C's: the values of both its headers, as they stand there.

    traceparent: which span is whose parent. tracestate: what tracing systems have to tell each
    other, which is handed on and never read.
    """

    traceparent: str = ""
    tracestate: str = ""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What a gateway submits to a leader under a lease.

    request_key: internal, unique per attempt; never a client-chosen id.
    deadline_s: seconds left when sent; None = no deadline. request_id: the client's name for it,
    for logs only. trace: of who submits; empty = not traced. transfer: from where, by its
    lease, a part of the prompt may be copied.
    """

    request_key: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    samples: tuple[SampleStart, ...]
    lease_id: int | None = None
    lease_blocks: int = 0
    admission_class: AdmissionClass = AdmissionClass.STANDARD
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""
    adapter: str = ""
    request_id: str = ""
    trace: TraceContext = field(default_factory=TraceContext)
    transfer: PrefixTransfer | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position; all finite (-inf is sent as -9999.0, never NaN).

    token_ids[0] is the token at this position, then the best ones, best first, without repeats
    of it; ranks start at 1.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Counted by the engine, sent with the end of each sample."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    preemptions: int = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class SequenceDelta(NamedTuple):
    """New tokens of one sample, from engine to gateway. `finish_reason` set = the last one.

    A named tuple since every token of every step is one: a frozen dataclass takes twice as long
    to make.

    first_position: number of output tokens of this sample sent before (resumed ones counted):
    lets the gateway prove that nothing is missing or doubled.
    prompt_logprobs: on the first delta of index 0 only; entry 0 (no context) is None.
    error_class: names the class of `protos.errors` that the client shall see: Overloaded = the
        lease was refused, reserve again; Unavailable = the replica is lost, resume elsewhere;
        empty with an error = InternalError.
    score: of a beam search's result: sum of log-probabilities / length ** length_penalty.
    """

    request_key: str
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]  # nobody searches a delta
    first_position: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: str = ""
    error_class: str = ""
    score: float | None = None


Weights = tuple[int, str]  # version, fingerprint


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """All that KV content depends on besides tokens; the root of both hash chains is made of it.

    weights_version is the cluster's; secret is the cluster's or empty.
    """

    model_fingerprint: str
    weights_version: int
    kv_dtype: str
    block_size: int
    adapter: str = ""
    salt: str = ""
    secret: str = ""

    @property
    def weights(self) -> "Weights":
        """Which weights they are: a stream goes on with those it began with, or not at all."""
        return self.weights_version, self.model_fingerprint


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """The four states of one tier; they always add up to `total` (I1)."""

    clean: int = 0
    cached_idle: int = 0
    referenced: int = 0
    fenced: int = 0

    @property
    def total(self) -> int:
        """Blocks of the tier."""
        return self.clean + self.cached_idle + self.referenced + self.fenced

    @property
    def free(self) -> int:
        """Blocks that an allocation could have now."""
        return self.clean + self.cached_idle


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What a replica says of itself when it registers.

    address: host:port of the leader's engine_server. stream_secret: what a gateway must show
    there; only the controller hands it out. max_context: the longest sequence, in tokens.
    block_bytes: of one block on one rank, 0 where unknown; prices loads from the host tier.
    memory: how its memory is divided, for people to read. startup_s: from the decision to start it
    to this registration; 0 = unknown.
    actors: names of its ranks' actors, the leader's first; without them, or without a host tier,
    no blocks are exchanged with it.
    """

    replica_id: str
    incarnation: str
    model: str
    identity: CacheIdentity
    address: str
    stream_secret: str
    num_blocks: int
    num_host_blocks: int
    max_context: int
    max_num_sequences: int
    prefill_tokens_per_s: float
    decode_step_s: float
    node_id: str = ""
    tensor_parallel: int = 1
    block_bytes: int = 0
    memory: str = ""
    startup_s: float = 0.0
    checkpoint: str = ""
    weights_ordered: bool = False
    actors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseUse:
    """A lease that the leader has accepted and what it still may take."""

    lease_id: int
    remaining_blocks: int


@dataclass(frozen=True, slots=True)
class RouteEvents:
    """Route hashes that appeared on, or vanished from, a tier since the last report.

    A hash is 16 bytes. In a snapshot `stored_*` is everything resident and `removed_*` is empty.
    """

    stored_device: tuple[bytes, ...] = ()
    removed_device: tuple[bytes, ...] = ()
    stored_host: tuple[bytes, ...] = ()
    removed_host: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaCounters:
    """What has happened in one incarnation so far, for metrics; nothing is decided by them.

    blocks_evicted, host_blocks_evicted: content dropped to make room. blocks_stored,
    blocks_loaded: copied to and from the host tier. One count per way to meet exhaustion:
    admissions_deferred, rows_held, swaps_refused, queue_full, leases_refused, kv_exhausted.
    draft_tokens: guessed ahead; accepted_tokens: of these, those that were right.
    """

    blocks_evicted: int = 0
    host_blocks_evicted: int = 0
    blocks_stored: int = 0
    blocks_loaded: int = 0
    copies_failed: int = 0
    copies_on_write: int = 0
    collisions_refused: int = 0
    expired: int = 0
    admissions_deferred: int = 0
    rows_held: int = 0
    swaps_refused: int = 0
    queue_full: int = 0
    leases_refused: int = 0
    kv_exhausted: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PoolMap:
    """The blocks of one tier in the order of their ids, as a bounded number of cells.

    cells: one byte each. The lowest three bits are a `scheduler.block_map.BlockState`, the one
    that most blocks of the cell are in; the upper five how many of them are, in 31sts.
    """

    num_blocks: int
    cells: bytes


@dataclass(frozen=True, slots=True)
class WantedWeights:
    """What a model's replicas are to load."""

    checkpoint: str
    version: int


@dataclass(frozen=True, slots=True)
class CacheReset:
    """What a replica did when it was told to forget: blocks that had content, its epoch since."""

    replica_id: str
    num_blocks: int
    epoch: int


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """Leader → controller: counts, ledger, speed, and what became or ceased to be resident.

    sequence_number: +1 per report of this incarnation; a gap makes the controller ask for a
    snapshot. digest_*: XOR of all resident route hashes of the tier, as an int.
    steps_done: moves each step, and each second when idle: the watchdog's pulse.
    leases: every accepted, unfinished lease. finished_leases: since the last report.
    finished_output_tokens: lengths of the samples that ended by themselves since the last report.
    draining: it takes no more requests and ends once it is empty.
    step_p99_s: of the last steps; what the watchdog's patience follows. 0 = not known.
    hit_tokens / query_tokens: prompt tokens found cached / looked up, over the incarnation.
    preemptions_swap: of the preemptions, those that swapped; the others recompute.
    """

    replica_id: str
    incarnation: str
    epoch: int
    sequence_number: int
    steps_done: int
    device: BlockCounts
    host: BlockCounts
    leases: tuple[LeaseUse, ...]
    finished_leases: tuple[int, ...]
    num_waiting: int
    num_running: int
    waiting_prefill_tokens: int
    prefill_tokens_per_s: float
    decode_step_s: float
    copy_bytes_per_s: float
    preemptions: int
    events: RouteEvents
    digest_device: int = 0
    digest_host: int = 0
    is_snapshot: bool = False
    hit_tokens: int = 0
    query_tokens: int = 0
    finished_output_tokens: tuple[int, ...] = ()
    draining: bool = False
    renews: bool = False  # with `draining`: another incarnation follows
    reset_order: int = 0  # the last one obeyed, and how many blocks had some content then
    reset_blocks: int = 0
    step_p99_s: float = 0.0
    preemptions_swap: int = 0
    counters: ReplicaCounters = field(default_factory=ReplicaCounters)
    transfers: TransferStats = field(default_factory=TransferStats)
    device_map: PoolMap | None = None  # only where the last reply asked for maps
    host_map: PoolMap | None = None


@dataclass(frozen=True, slots=True)
class ReportReply:
    """Controller → leader. `unknown` = register again (the controller restarted).

    drain_s: with `draining`, how long streams may go on here before they must go on elsewhere.
    peers: with `draining`, who may take over what is worth keeping of its cache.
    map_cells: someone looks at the pools: send maps of at most so many cells now and then.
    """

    unknown: bool = False
    needs_snapshot: bool = False
    draining: bool = False
    fence: bool = False  # declared dead: stop serving at once
    drain_s: float = 0.0
    renews: bool = False  # with `draining`: another incarnation is to follow, with new weights
    reset_order: int = 0  # number of the last order to forget what is cached
    peers: tuple[TransferPeer, ...] = ()
    map_cells: int = 0


@dataclass(frozen=True, slots=True)
class ReserveRequest:
    """Gateway → controller: route and reserve, one atomic step; idempotent by (key, attempt).

    route_hashes: §3.2's route chain over prompt (and resumed output), 16 bytes each.
    num_tokens: tokens known now (prompt + resumed output). excluded: replicas that just failed
    this request. deadline_s: seconds left. request_id: the client's name for it, to be shown
    only. trace: of who asks; empty = not traced. weights: those that its output so far is of; None
    = it has none, and any will do.
    """

    request_key: str
    attempt: int
    gateway_id: str
    model: str
    route_hashes: tuple[bytes, ...]
    num_tokens: int
    num_samples: int
    max_tokens: int | None
    admission_class: AdmissionClass = AdmissionClass.STANDARD
    priority: int = 0
    tenant: str = ""
    deadline_s: float | None = None
    retry_token: str = ""
    excluded: tuple[str, ...] = ()
    request_id: str = ""
    trace: TraceContext = field(default_factory=TraceContext)
    weights: Weights | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks promised to one request on one incarnation until used, given back, or expired.

    weights: of that incarnation.
    """

    lease_id: int
    request_key: str
    attempt: int
    replica_id: str
    incarnation: str
    address: str
    stream_secret: str
    num_blocks: int
    expected_hit_tokens: int
    expires_in_s: float
    weights: Weights | None = None
    transfer: PrefixTransfer | None = None


@dataclass(frozen=True, slots=True)
class Ticket:
    """The request waits in the controller; its grant comes through `next_grants`."""

    request_key: str
    attempt: int
    position: int
    expected_wait_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was not taken. `retryable` False = it can never fit or names no model.

    `error` names the class of `protos.errors` that the client shall see.
    retry_token: shown again in `ReserveRequest.retry_token`, it goes before newcomers.
    """

    request_key: str
    attempt: int
    error: str
    reason: str
    retry_after_s: float | None = None
    retry_token: str = ""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a gateway must know of a served model to tokenize, hash, and refuse early."""

    model: str
    tokenizer_dir: str
    identity: CacheIdentity
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    aliases: tuple[str, ...] = field(default=())


class ReplicaState(StrEnum):
    """Where a replica stands in the controller's eyes."""

    STARTING = "starting"  # registered, its first counts are still to come
    READY = "ready"
    SUSPECT = "suspect"  # a gateway lost its stream; the next report clears it
    DRAINING = "draining"  # no new leases; streams finish or move
    DEAD = "dead"  # silent or stuck for too long, or killed


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica as the controller sees it.

    leased_blocks: what accepted and granted leases still may take.
    available_blocks: what a new lease could have now, never negative.
    hit_tokens / query_tokens: prompt tokens found cached / looked up, over this incarnation.
    report_age_s: None before the first report.
    """

    replica_id: str
    incarnation: str
    model: str
    state: ReplicaState
    address: str
    device: BlockCounts
    host: BlockCounts
    num_waiting: int
    num_running: int
    leased_blocks: int
    available_blocks: int
    hit_tokens: int
    query_tokens: int
    preemptions: int
    steps_done: int
    indexed_device: int
    indexed_host: int
    report_age_s: float | None
    node_id: str = ""
    preemptions_swap: int = 0
    copy_bytes_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    num_leases: int = 0  # granted or accepted, and not ended
    renews: bool = False  # it drains, and comes again with new weights
    weights_version: int = 0
    counters: ReplicaCounters = field(default_factory=ReplicaCounters)
    transfers_offered: int = 0  # leases that named a source to copy from
    transfers: TransferStats = field(default_factory=TransferStats)
    reports_lost: int = 0
    snapshots_asked: int = 0  # because one was lost, or a digest differed


@dataclass(frozen=True, slots=True)
class CallTimes:
    """How long one kind of call took, as a histogram: `counts` by upper bound, then beyond all."""

    call: str
    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    total_s: float


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The whole cluster at one moment, for status pages and scaling.

    oldest_wait_s: of the requests that wait in the controller. calls: how long its own work takes.
    """

    replicas: tuple[ReplicaStatus, ...]
    queued_requests: int
    queued_tokens: int
    granted: int  # leases granted since the controller started
    refused: int
    expired: int  # deadlines that passed in the queue
    policy: str
    uptime_s: float
    oldest_wait_s: float = 0.0
    calls: tuple[CallTimes, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaExplanation:
    """What one replica would cost a request, every term in ms; the lowest total wins.

    prefill_ms: prompt tokens not resident. load_ms: blocks copied from its host tier.
    queue_ms: prefill work before it. blocks_ms: until enough blocks are free.
    transfer_ms: to copy transfer_tokens from the replica transfer_from, and to load them, where
    that is cheaper than to compute them; prefill_ms is without them.
    batch_ms: slow-down of its batch. affinity_ms: cached work elsewhere that would be redone.
    """

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
    transfer_ms: float = 0.0
    transfer_tokens: int = 0
    transfer_from: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What would happen to a request now, and why. Nothing is reserved by asking."""

    policy: str
    decision: str  # "grant", "wait" or "refuse"
    reason: str
    replica_id: str | None
    lease_blocks: int
    expected_output_tokens: int
    expected_wait_s: float
    queue_position: int
    replicas: tuple[ReplicaExplanation, ...]


@dataclass(frozen=True, slots=True)
class PoolView:
    """The last map of one tier of one replica."""

    replica_id: str
    tier: str
    map: PoolMap


@dataclass(frozen=True, slots=True)
class WaitingView:
    """A request that waits in the controller."""

    request_key: str
    request_id: str
    tenant: str
    model: str
    admission_class: AdmissionClass
    priority: int
    num_tokens: int
    num_blocks: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class LeaseView:
    """A lease that has not ended. request_key is empty where an earlier controller granted it."""

    lease_id: int
    replica_id: str
    request_key: str
    request_id: str
    tenant: str
    admission_class: AdmissionClass
    num_blocks: int
    remaining_blocks: int
    age_s: float
    accepted: bool


@dataclass(frozen=True, slots=True)
class DecisionView:
    """What was decided on one request, and why.

    number: +1 each, from the controller's start. decision: "grant", "wait", "refuse" or "expire".
    replicas: the chosen replica's cost and the best other one's; only while someone watches.
    """

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
    replicas: tuple[ReplicaExplanation, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A run of prompt tokens that all requests below it begin with.

    parent: position of its parent in the same tuple, always an earlier one. label: the begin of
    its last route hash. num_tokens: from the prompt's beginning to this node's end.
    """

    model: str
    tenant: str
    parent: int | None
    label: str
    num_tokens: int
    num_requests: int
    num_device_replicas: int
    num_host_replicas: int


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All that a dashboard shows, bounded in size whatever the cluster's.

    waiting: the oldest ones; leases: the newest ones, num_leases is all. decisions: the newest
    ones, oldest first.
    """

    state: ClusterState
    pools: tuple[PoolView, ...]
    waiting: tuple[WaitingView, ...]
    leases: tuple[LeaseView, ...]
    num_leases: int
    decisions: tuple[DecisionView, ...]
    prefixes: tuple[PrefixNode, ...]
