"""Swap or recompute: what each would cost a row, in milliseconds. Decides; moves nothing."""

from .books import Books
from .config import PreemptionMode

# What a millisecond of copying takes from the steps it runs beside. Between 0.25 and 0.33 `auto`
# is within 5 % of the better policy over the whole grid of tests/scheduler/test_preemption_costs.
_COPY_SHARE = 0.3


class SwapPolicy:
    """Prices of losing a row's KV, from measured rates and from where its blocks are."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._batch = books.batch
        self._pool = books.pool
        self._manager = books.manager

    def prefers_swap(self, row: int) -> bool:
        """Whether a victim's KV shall go to the host rather than be computed again."""
        mode = self._books.config.preemption_mode
        if not self._books.host.num_blocks or mode is PreemptionMode.RECOMPUTE:
            return False
        recompute_ms, swap_ms = self.costs_ms(row)
        return mode is PreemptionMode.SWAP or swap_ms <= recompute_ms

    def costs_ms(self, row: int) -> tuple[float, float]:
        """Milliseconds of the steps' time to recompute a row later, and to swap it out and in.

        Blocks that others hold stay where they are and cost neither; what is on the host
        already need not be stored, and is not computed again either.
        """
        costs, config = self._books.costs, self._books.config
        num_computed = int(self._batch.num_computed[row])
        blocks = self._manager.blocks(row)[: self._manager.num_blocks_for(num_computed)]
        own = [block for block in blocks if self._pool.ref_count(block) == 1]
        on_host = sum(map(self._is_on_host, own)) if self._books.host.num_blocks else 0
        num_resident = len(blocks) - len(own)
        if costs.loads_pay:
            num_resident += on_host
        num_lost = max(0, num_computed - num_resident * config.block_size)
        recompute_ms = costs.recompute_ms(num_lost) + costs.copy_ms(on_host) * costs.loads_pay
        num_copies = len(own) - on_host + len(own)
        return recompute_ms, _COPY_SHARE * costs.copy_ms(num_copies)

    def _is_on_host(self, block: int) -> bool:
        content = self._pool.content(block)
        return content is not None and content.blocks[1] is not None
