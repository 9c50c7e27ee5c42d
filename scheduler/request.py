"""A request and its sequences as the scheduler sees them. Knows no block and no row's arrays.

While a sequence runs, its tokens and counts live in the `RunningBatch`; the fields here are
those that outlive a row, and the hash chain, which only grows.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from ..protos.messages import (
    AdmissionClass,
    EngineRequest,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
    Usage,
)
from .content import Content
from .output import Int32Array

_CLASS_RANKS = {
    AdmissionClass.GUARANTEED: 0,
    AdmissionClass.STANDARD: 1,
    AdmissionClass.BEST_EFFORT: 2,
}


class SequenceState(Enum):
    """Where a sequence is in its life."""

    HELD = auto()  # waits for its siblings: for the prompt, or for the other beams' offers
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class HashChain:
    """The pool chain over a sequence's full blocks, as far as it has been needed.

    tokens: each block's bytes. routes: the route chain over the same tokens.
    """

    hashes: list[bytes] = field(default_factory=list[bytes])
    tokens: list[bytes] = field(default_factory=list[bytes])
    routes: list[bytes] = field(default_factory=list[bytes])

    def copy(self) -> "HashChain":
        """For a fork: the same past, a future of its own."""
        return HashChain(self.hashes[:], self.tokens[:], self.routes[:])


@dataclass(slots=True, eq=False)
class Publication:
    """How far a sequence's blocks may be found by others.

    last: content of the last published block (the root before any); last_id: its id then.
    stopped: nothing more is published (a collision, or the cache was reset meanwhile).
    """

    last: Content
    last_id: int
    num_blocks: int = 0
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class SwappedBlock:
    """One block of a swapped sequence. content: None where only its owner knows the block."""

    host_block: int
    content: Content | None
    content_id: int


@dataclass(frozen=True, slots=True)
class SwappedTable:
    """What a swapped sequence left on the host: its first `num_computed` positions."""

    blocks: list[SwappedBlock]
    num_computed: int


class Request:
    """One client call, shared by its sequences."""

    def __init__(
        self, request: EngineRequest, arrival: int, now: float, token_limit: int, root_hash: bytes
    ) -> None:
        self.key = request.request_key
        self.prompt: Int32Array = np.array(request.prompt_token_ids, dtype=np.int32)
        self.sampling: SamplingParams = request.sampling
        self.admission_class = request.admission_class
        self.priority = request.priority
        self.lease_id = request.lease_id
        self.lease_blocks = request.lease_blocks
        self.num_blocks_borrowed = 0  # held by others' tables when it entered
        self.root_hash = root_hash
        self.arrival = arrival
        self.arrival_s = now
        self.deadline: float | None = (
            None if request.deadline_s is None else now + request.deadline_s
        )
        self.token_limit = token_limit
        self.stop_token_ids: frozenset[int] = frozenset(request.sampling.stop_token_ids)
        self.sequences: list[Sequence] = []
        self.prompt_chain = HashChain()
        self.prompt_is_computed = False

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def compute_limit(self) -> int:
        """Positions that are ever computed: the last sampled token's is not."""
        return max(self.num_prompt_tokens, self.token_limit - 1)

    @property
    def class_rank(self) -> int:
        """0 = guaranteed, 1 = standard, 2 = best-effort."""
        return _CLASS_RANKS[self.admission_class]

    @property
    def is_beam_search(self) -> bool:
        """Whether its sequences are beams, which go on and end together."""
        return self.sampling.beam_width > 1 and self.sampling.max_tokens != 0

    @property
    def is_guaranteed(self) -> bool:
        """Whether its worst case is reserved."""
        return self.admission_class is AdmissionClass.GUARANTEED

    @property
    def queue_key(self) -> tuple[int, int, int]:
        """Class, then priority (higher first), then age. A preempted request keeps its place."""
        return self.class_rank, -self.priority, self.arrival

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended."""
        return all(s.state is SequenceState.FINISHED for s in self.sequences)


class Sequence:
    """One sample of a request.

    token_ids: prompt and output known so far; kept here only while it has no row.
    num_pending: tokens sampled by a step in flight when it lost its row; it takes them first.
    """

    def __init__(
        self, sequence_id: int, request: Request, index: int, output_token_ids: tuple[int, ...]
    ) -> None:
        self.id = sequence_id
        self.request = request
        self.index = index
        self.state = SequenceState.WAITING
        self.row: int | None = None
        self.token_ids: Int32Array = (
            np.concatenate((request.prompt, np.array(output_token_ids, dtype=np.int32)))
            if output_token_ids
            else request.prompt
        )
        self.is_fresh = not output_token_ids
        self.num_pending = 0
        self.chain = request.prompt_chain
        self.publication: Publication | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.owes_prompt_logprobs = index == 0 and request.sampling.prompt_logprobs is not None
        self.cached_tokens: int | None = None
        self.swapped: SwappedTable | None = None
        self.num_open_copies = 0  # it cannot go on before they have ended
        self.last_step = 0  # the last one in flight when it lost its row
        self.num_preemptions = 0
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose KV is neither on the host nor, by what is known, anywhere."""
        return len(self.token_ids) - (0 if self.swapped is None else self.swapped.num_computed)

    def stop_reason(
        self, token: int, num_output_tokens: int, eos: frozenset[int]
    ) -> FinishReason | None:
        """Whether it ends with `token`, the last of so many outputs, and why."""
        sampling = self.request.sampling
        if num_output_tokens >= sampling.min_tokens and (
            token in self.request.stop_token_ids or (token in eos and not sampling.ignore_eos)
        ):
            return FinishReason.STOP
        if self.num_prompt_tokens + num_output_tokens >= self.request.token_limit:
            return FinishReason.LENGTH
        return None

    def usage(self, num_output_tokens: int, now: float) -> Usage:
        """What it has cost, counted at its end."""
        arrival = self.request.arrival_s
        admitted = now if self.admitted_s is None else self.admitted_s
        first = now if self.first_token_s is None else self.first_token_s
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.cached_tokens or 0,
            completion_tokens=num_output_tokens,
            preemptions=self.num_preemptions,
            queued_s=admitted - arrival,
            prefill_s=max(0.0, first - admitted),
            decode_s=max(0.0, now - first),
        )

    def __repr__(self) -> str:
        return f"Sequence({self.request.key}/{self.index}, {self.state.name}, row={self.row})"
