"""A replica without a model, for the simulator: real block accounting under a simple cost model.

The `replay` model: requests start first come first served, one prefill at a time at a constant
rate plus a constant, then each token takes the same time whatever else runs. A request starts
only when the blocks for its whole length fit. Blocks, prefix hits, eviction and the reported
route hashes are those of the real pool. Time comes in; nothing here waits.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from ..protos.messages import (
    BlockCounts,
    Lease,
    LeaseUse,
    ReplicaInfo,
    ReplicaReport,
    TransferStats,
)
from ..scheduler.block_hash import (
    block_hashes,
    root_hash,
    route_hashes,
    split_blocks,
    stride_blocks,
)
from ..scheduler.block_pool import BlockPool
from ..scheduler.content_index import Content, ContentIndex
from ..scheduler.route_residency import RouteResidency, Tier
from .workload import TraceRequest


@dataclass(frozen=True, slots=True)
class ReplayCost:
    """Constants of the `replay` cost model.

    reports_progress: False = a running prefill counts whole until it ends, which is what routers
    see that only count what they sent.
    """

    prefill_tokens_per_s: float = 40_000.0
    prefill_overhead_s: float = 0.005
    token_s: float = 0.020
    max_running: int = 64
    reports_progress: bool = True


@dataclass(frozen=True, slots=True)
class Fetch:
    """Blocks of its prompt that are being copied from another replica: so many of the first are
    there once it is ready; 0 = the copy fails."""

    ready_at: float
    num_blocks: int


@dataclass(slots=True)
class SimulatedRequest:
    """One request on its way through the simulated cluster, and what was measured of it."""

    key: str
    trace: TraceRequest
    route_hashes: tuple[bytes, ...]
    hashes: list[bytes]
    tokens: list[bytes]
    attempt: int = 1
    lease: Lease | None = None
    retry_token: str = ""
    num_refusals: int = 0
    first_retry_served: bool | None = None
    replica_id: str = ""
    hit_tokens: int = 0
    num_preemptions: int = 0
    first_token_s: float | None = None
    finished_s: float | None = None
    outcome: str = ""
    fetch: Fetch | None = None

    @property
    def has_first_appointment(self) -> bool:
        """Whether it was refused once, and told a time that it was promised to be let in at."""
        return self.num_refusals == 1 and bool(self.retry_token)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.trace.num_prompt_tokens


def make_request(key: str, trace: TraceRequest, root: bytes, block_size: int) -> SimulatedRequest:
    """Hash a prompt as its gateway and its replica would; root: of both chains."""
    prompt = trace.prompt()
    routes = route_hashes(root, prompt, block_size)
    is_same = stride_blocks(block_size) == 1  # both chains have an entry per block
    hashes = list(routes) if is_same else block_hashes(root, prompt, block_size)
    return SimulatedRequest(key, trace, routes, hashes, split_blocks(prompt, block_size))


@dataclass(slots=True)
class _Running:
    request: SimulatedRequest
    blocks: list[int]
    num_hit_blocks: int
    prefill_end: float
    end: float


@dataclass(slots=True)
class _Waiting:
    request: SimulatedRequest
    uncached_tokens: int


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that the replica will do by itself at a time: call `advance` then."""

    at: float


@dataclass(slots=True)
class ReplayReplica:
    """One replica's life, from one incarnation to its end."""

    info: ReplicaInfo
    cost: ReplayCost
    steps_done: int = 0
    hit_tokens: int = 0
    query_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    transfers: TransferStats = field(default_factory=TransferStats)
    _sequence_number: int = 0
    _queue: deque[_Waiting] = field(default_factory=deque[_Waiting])
    _arriving: list[_Waiting] = field(default_factory=list[_Waiting])  # their blocks are
    _running: dict[str, _Running] = field(default_factory=dict[str, _Running])
    _prefilling: _Running | None = None
    _leases: dict[int, LeaseUse] = field(default_factory=dict[int, LeaseUse])
    _finished_leases: list[int] = field(default_factory=list[int])
    _finished_outputs: list[int] = field(default_factory=list[int])
    _routes: RouteResidency = field(default_factory=RouteResidency)
    _index: ContentIndex = field(init=False)
    _pool: BlockPool = field(init=False)
    _root: Content = field(init=False)
    _stride: int = field(init=False)

    def __post_init__(self) -> None:
        identity = self.info.identity
        self._index = ContentIndex(self.info.num_blocks, self._routes)
        self._pool = BlockPool(self.info.num_blocks, self._index)
        self._root = self._index.root(root_hash(identity))
        self._stride = stride_blocks(identity.block_size)

    def unfinished(self) -> list[SimulatedRequest]:
        """The requests that a crash would lose, in the order they came."""
        running = [running.request for running in self._running.values()]
        return running + [waiting.request for waiting in (*self._queue, *self._arriving)]

    def num_held(self, request: SimulatedRequest) -> int:
        """Blocks at the beginning of its prompt that are here."""
        return len(self._find_prefix(request))

    def submit(self, request: SimulatedRequest, now: float) -> bool:
        """A request arrives with its lease; this leader takes every one."""
        lease = request.lease
        assert lease is not None, f"{request.key} came without a lease"
        self._leases[lease.lease_id] = LeaseUse(lease.lease_id, lease.num_blocks)
        num_blocks = len(self._find_prefix(request))
        if request.fetch is not None:
            num_blocks = max(num_blocks, request.fetch.num_blocks)
        hit = num_blocks * self.info.identity.block_size
        waiting = _Waiting(request, max(1, request.num_prompt_tokens - hit))
        if request.fetch is None:
            self._queue.append(waiting)
        else:
            self._arriving.append(waiting)
        return True

    def advance(self, now: float) -> tuple[list[Happening], list[SimulatedRequest]]:
        """Do what is due; returns what will happen next and the requests that have finished."""
        finished = self._finish_due(now)
        happenings = self._let_in(now)
        prefilling = self._prefilling
        if prefilling is not None and prefilling.prefill_end <= now:
            self._publish(prefilling)
            self._prefilling = None
            prefilling.request.first_token_s = now
            self.steps_done += 1
            happenings.append(Happening(prefilling.end))
        started = self._start_next(now)
        if started is not None:
            happenings.append(Happening(started.prefill_end))
        return happenings, finished

    def report(self, now: float, *, snapshot: bool = False) -> ReplicaReport:
        """The next report of this incarnation."""
        self._sequence_number += 1
        finished, self._finished_leases = tuple(self._finished_leases), []
        outputs, self._finished_outputs = tuple(self._finished_outputs), []
        events = self._routes.take_events()
        if snapshot:
            events = self._routes.snapshot()
        digest_device, digest_host = self._routes.digests
        return ReplicaReport(
            replica_id=self.info.replica_id,
            incarnation=self.info.incarnation,
            epoch=0,
            sequence_number=self._sequence_number,
            steps_done=self._steps_done(now),
            device=self._pool.stats(),
            host=BlockCounts(),
            leases=tuple(self._leases.values()),
            finished_leases=finished,
            num_waiting=len(self._queue) + len(self._arriving),
            num_running=len(self._running),
            waiting_prefill_tokens=self._waiting_prefill_tokens(now),
            prefill_tokens_per_s=self.cost.prefill_tokens_per_s,
            decode_step_s=self.cost.token_s,
            copy_bytes_per_s=0.0,
            preemptions=0,
            events=events,
            digest_device=digest_device,
            digest_host=digest_host,
            is_snapshot=snapshot,
            hit_tokens=self.hit_tokens,
            query_tokens=self.query_tokens,
            finished_output_tokens=outputs,
            transfers=self.transfers,
        )

    def check_integrity(self) -> None:
        """Assert that the pool's books agree and that every block is accounted for."""
        self._pool.check_integrity()
        counts = self._pool.stats()
        held = len({block for running in self._running.values() for block in running.blocks})
        assert counts.referenced == held, f"{counts.referenced} referenced, {held} held"

    # One step each

    def _let_in(self, now: float) -> list[Happening]:
        """Queue those whose blocks have come, and say when the next ones will."""
        later: list[_Waiting] = []
        for waiting in self._arriving:
            fetch = waiting.request.fetch
            if fetch is None or fetch.ready_at <= now:
                self._queue.append(waiting)
            else:
                later.append(waiting)
        self._arriving = later
        return [Happening(w.request.fetch.ready_at) for w in later if w.request.fetch is not None]

    def _steps_done(self, now: float) -> int:
        # Decoding happens between two calls: while something runs, so do its steps.
        return self.steps_done + (int(now / self.cost.token_s) if self._running else 0)

    def _waiting_prefill_tokens(self, now: float) -> int:
        # The rest of the running prefill counts with its constant part, as tokens of time.
        waiting = sum(w.uncached_tokens for w in (*self._queue, *self._arriving))
        prefilling = self._prefilling
        if prefilling is None:
            return waiting
        if not self.cost.reports_progress:
            hit = prefilling.num_hit_blocks * self.info.identity.block_size
            return waiting + prefilling.request.num_prompt_tokens - hit
        left_s = max(0.0, prefilling.prefill_end - now)
        return waiting + round(left_s * self.cost.prefill_tokens_per_s)

    def _find_prefix(self, request: SimulatedRequest) -> list[Content]:
        limit = (request.num_prompt_tokens - 1) // self.info.identity.block_size
        return self._index.lookup(self._root, request.hashes[:limit], request.tokens[:limit])

    def _start_next(self, now: float) -> _Running | None:
        if self._prefilling is not None or not self._queue:
            return None
        if len(self._running) >= self.cost.max_running:
            return None
        request = self._queue[0].request
        contents = self._find_prefix(request)
        blocks = self._take_blocks(request, contents)
        if blocks is None:
            return None
        self._queue.popleft()
        size = self.info.identity.block_size
        hit = max(len(contents), self._num_fetched(request)) * size
        prefill_s = (request.num_prompt_tokens - hit) / self.cost.prefill_tokens_per_s
        end = now + self.cost.prefill_overhead_s + prefill_s
        output_s = request.trace.num_output_tokens * self.cost.token_s
        running = _Running(request, blocks, hit // size, end, end + output_s)
        self._running[request.key] = self._prefilling = running
        self._count_hit(request, hit)
        if request.lease is not None:
            lease_id = request.lease.lease_id
            self._leases[lease_id] = LeaseUse(lease_id, 0)  # every block it needs is taken
        return running

    def _num_fetched(self, request: SimulatedRequest) -> int:
        """Blocks of its prompt that were copied here for it; the last token is computed."""
        if request.fetch is None:
            return 0
        most = (request.num_prompt_tokens - 1) // self.info.identity.block_size
        return min(request.fetch.num_blocks, most)

    def _count_hit(self, request: SimulatedRequest, hit: int) -> None:
        request.hit_tokens = hit
        request.replica_id = self.info.replica_id
        self.hit_tokens += hit
        self.query_tokens += request.num_prompt_tokens
        self.computed_tokens += request.num_prompt_tokens - hit
        self.steps_done += 1

    def _take_blocks(self, request: SimulatedRequest, contents: list[Content]) -> list[int] | None:
        """Blocks for prompt and output, or None if they do not fit."""
        size = self.info.identity.block_size
        total = -(-(request.num_prompt_tokens + request.trace.num_output_tokens) // size)
        cached = [content.blocks[Tier.DEVICE] for content in contents]
        hits = [block for block in cached if block is not None]
        assert len(hits) == len(contents), "a content without a device block was found"
        num_idle = sum(self._pool.ref_count(block) == 0 for block in hits)
        if total - len(hits) + num_idle > self._pool.num_free:
            return None
        self._pool.reference(hits)
        fresh = self._pool.allocate(total - len(hits))
        assert fresh is not None, f"{total - len(hits)} blocks are not to be had"
        return hits + fresh

    def _publish(self, running: _Running) -> None:
        request, blocks = running.request, running.blocks
        parent = self._root
        for place, block in enumerate(blocks[: len(request.hashes)]):
            content = self._pool.content(block)
            if content is None:
                content = self._pool.publish(
                    block, parent, request.hashes[place], request.tokens[place]
                )
                if content is None:
                    return
                self._note_route(request, place + 1, content)
            parent = content

    def _note_route(self, request: SimulatedRequest, number: int, content: Content) -> None:
        stride = self._stride
        if number <= stride:
            self._index.add_stride(content, 1, request.route_hashes[number - 1])
        elif number % stride == 0:
            entry = stride + number // stride - 2
            self._index.add_stride(content, stride, request.route_hashes[entry])

    def _finish_due(self, now: float) -> list[SimulatedRequest]:
        due = [
            running
            for running in self._running.values()
            if running.end <= now and running is not self._prefilling
        ]
        for running in sorted(due, key=lambda running: running.end):
            request = running.request
            del self._running[request.key]
            self._pool.release(running.blocks)
            request.finished_s = running.end
            self.steps_done += 1
            if request.lease is not None:
                del self._leases[request.lease.lease_id]
                self._finished_leases.append(request.lease.lease_id)
                self._finished_outputs.append(request.trace.num_output_tokens)
        return [running.request for running in due]


def percentile(values: list[float], share: float) -> float:
    """The value that so large a share does not exceed; 0 of nothing."""
    return float(np.percentile(values, 100 * share)) if values else 0.0
