"""How many blocks a request may still take: the arithmetic behind the lease ledger."""

from ..protos.errors import InvalidArgument
from ..protos.messages import AdmissionClass, EngineRequest
from .block_pool import BlockPool
from .config import SchedulerConfig
from .kv_cache_manager import KVCacheManager
from .lease_ledger import LeaseLedger
from .request import Request, SequenceState


class LeaseNeeds:
    """Enters leases into the ledger and keeps their remainders true."""

    def __init__(
        self,
        config: SchedulerConfig,
        ledger: LeaseLedger,
        pool: BlockPool,
        manager: KVCacheManager,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._pool = pool
        self._manager = manager

    def accept(self, request: EngineRequest, token_limit: int, is_idle: bool) -> None:
        """Enter the request's lease or guarantee, if it has one, or refuse it.

        is_idle: nothing else is here, so that whatever fits the pool can be had.

        Raises:
            InvalidArgument: a guarantee that the whole pool could not keep.
            LeaseRefused: the blocks are not there.
        """
        is_guaranteed = request.admission_class is AdmissionClass.GUARANTEED
        if request.lease_id is None and not is_guaranteed:
            return
        num_blocks = request.lease_blocks
        if is_guaranteed:
            num_blocks = self._worst_case(request, token_limit)
            if num_blocks > self._config.num_blocks:
                raise InvalidArgument(
                    "sampling.max_tokens",
                    f"a guarantee would take {num_blocks} of {self._config.num_blocks} blocks",
                )
        promised = self._ledger.num_reserved if is_guaranteed else self._ledger.num_unused
        available = self._pool.num_free + self._pool.num_fenced - promised
        if num_blocks > available and not (is_idle and not is_guaranteed):
            raise self._ledger.refuse(f"{num_blocks} blocks leased, {available} available")
        self._ledger.accept(request.request_key, request.lease_id, num_blocks, is_guaranteed)

    def settle(self, request: Request) -> None:
        """Enter what the request may still take, after any change of what it holds."""
        if request.key not in self._ledger:
            return
        if request.is_guaranteed:
            remaining = self._worst_case_left(request)
        else:
            remaining = max(0, request.lease_blocks - self._num_taken(request))
        self._ledger.set_remaining(request.key, remaining)

    def _worst_case(self, request: EngineRequest, token_limit: int) -> int:
        """Blocks if every sample runs to its limit: full prompt blocks once, the rest each."""
        num_prompt = len(request.prompt_token_ids)
        shared = self._num_shared(num_prompt)
        longest = self._manager.num_blocks_for(max(num_prompt, token_limit - 1))
        num_samples = max(len(request.samples), request.sampling.beam_width)
        return shared + num_samples * (longest - shared)

    def _worst_case_left(self, request: Request) -> int:
        """Blocks that its samples would still take if all of them ran to their limits."""
        longest = self._manager.num_blocks_for(request.compute_limit)
        shared = self._num_shared(request.num_prompt_tokens)
        rows = [s.row for s in request.sequences if s.row is not None]
        if request.is_beam_search:  # which of them fork is not known before
            held = {block for row in rows for block in self._manager.blocks(row)}
            worst = shared + request.sampling.beam_width * (longest - shared)
            return max(0, worst - len(held))
        num_others = sum(
            s.state in (SequenceState.WAITING, SequenceState.HELD) for s in request.sequences
        )
        growth = sum(longest - self._manager.num_blocks(row) for row in rows)
        copies = self._manager.num_copies_on_write(rows)
        prompt = shared if num_others and not rows else 0
        return growth + copies + num_others * (longest - shared) + prompt

    def _num_taken(self, request: Request) -> int:
        """Blocks that the request has taken from the pool: those in its tables, the shared prompt
        counted once, without what others held when it entered."""
        rows = [s.row for s in request.sequences if s.row is not None]
        if not rows:
            return 0
        held = sum(self._manager.num_blocks(row) for row in rows)
        held -= (len(rows) - 1) * self._num_shared(request.num_prompt_tokens)
        return max(0, held - request.num_blocks_borrowed)

    def _num_shared(self, num_prompt_tokens: int) -> int:
        """Full prompt blocks that a second sample need not take again."""
        if not self._config.enable_prefix_caching:
            return 0
        return num_prompt_tokens // self._config.block_size
