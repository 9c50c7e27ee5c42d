"""All the books of one replica, made once and kept in step by those who write in them."""

import itertools
from dataclasses import dataclass

from .block_pool import BlockPool
from .config import SchedulerConfig
from .content_index import ContentIndex
from .costs import CostModel
from .host_pool import HostPool
from .host_tier import HostTier
from .kv_cache_manager import KVCacheManager
from .lease_ledger import LeaseLedger
from .lease_needs import LeaseNeeds
from .prefix_exports import PrefixExports
from .prefix_imports import PrefixImports
from .request_queue import RequestQueue
from .route_residency import RouteResidency
from .running_batch import RunningBatch


@dataclass(slots=True)
class Counters:
    """What has happened since the start; `SchedulerStats` says what each means."""

    hit_tokens: int = 0
    query_tokens: int = 0
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    swaps_refused: int = 0
    admissions_deferred: int = 0
    rows_held: int = 0
    kv_exhausted: int = 0
    expired: int = 0
    queue_full: int = 0
    copies_on_write: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Books:
    """Rows, queue, both pools, the index over them, tables, copies, prefixes that come and go,
    leases, costs, counters."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.batch = RunningBatch(config.max_num_sequences, config.max_context)
        self.queue = RequestQueue()
        self.routes = RouteResidency()
        capacity = config.num_blocks + config.num_host_blocks
        self.index = ContentIndex(capacity, self.routes, config.hash_bits)
        self.pool = BlockPool(config.num_blocks, self.index)
        self.host = HostPool(config.num_host_blocks, self.index)
        self.costs = CostModel(config)
        self.tier = HostTier(config, self.batch, self.pool, self.host, self.costs)
        self.manager = KVCacheManager(
            self.batch, self.pool, self.host, self.index, config.block_size
        )
        self.exports = PrefixExports(config, self.index, self.pool, self.host, self.tier)
        self.imports = PrefixImports(
            config, self.index, self.host, self.tier, self.manager, self.costs
        )
        self.ledger = LeaseLedger()
        self.leases = LeaseNeeds(config, self.ledger, self.pool, self.manager)
        self.counters = Counters()

    def check_integrity(self) -> None:
        """Compare all books with themselves and with each other."""
        for book in (
            self.pool,
            self.host,
            self.index,
            self.batch,
            self.manager,
            self.queue,
            self.tier,
            self.ledger,
        ):
            book.check_integrity()
        self._check_host_references()

    def _check_host_references(self) -> None:
        """Host blocks are held by swapped sequences, by the cleaner while it copies, and by what
        goes to other replicas or comes from them."""
        holders = [0] * self.host.num_blocks
        held = (self.exports.held_blocks(), self.imports.held_blocks())
        for block in itertools.chain(self.tier.cleaning_blocks(), *held):
            holders[block] += 1
        for sequence in self.queue:
            if sequence.swapped is not None:
                for entry in sequence.swapped.blocks:
                    holders[entry.host_block] += 1
        self.host.check_holders(holders)
