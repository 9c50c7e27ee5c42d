"""Prefixes that are fetched from other replicas, until they are cached content of the host tier.

Knows contents, the host tier, who waits and time as it is told; not how bytes travel. Only ranks'
own staging buffers are written while a fetch runs, so that it can be given up at any moment.

    open ─► order ─► fetched elsewhere ─► arrived ─► copied from staging ─► published ─► waiters
              └ failed, too late, a cache reset ───────── nothing is published ───────────► go on

What arrives is published as what was computed here would be: under its predecessor, or not at all.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..protos.messages import PrefixTransfer
from .block_hash import extend_chain
from .config import SchedulerConfig
from .content import Content
from .content_index import ContentIndex
from .costs import CostModel
from .host_pool import HostPool
from .host_tier import HostTier, OnEnd
from .kv_cache_manager import KVCacheManager
from .prefix_exports import SharedPrefix
from .request import HashChain, Request

MAX_NUM_IMPORTS = 4


@dataclass(frozen=True, slots=True)
class ImportOrder:
    """What is to be fetched: the blocks of `prefix` from number `first` on."""

    import_id: int
    transfer: PrefixTransfer
    prefix: SharedPrefix
    first: int


@dataclass(slots=True, eq=False)
class _Import:
    """start, blocks: the host blocks being filled, and the number of the first in the chain."""

    id: int
    root_hash: bytes
    chain: HashChain
    first: int
    expires_at: float
    waiters: list[Request] = field(default_factory=list[Request])
    watchers: list[OnEnd] = field(default_factory=list[OnEnd])
    start: int = 0
    blocks: list[int] = field(default_factory=list[int])
    is_copying: bool = False
    is_void: bool = False


@dataclass(slots=True)
class ImportCounts:
    """Since the start. refused: too many at once, or of no use here. blocks: published."""

    opened: int = 0
    done: int = 0
    failed: int = 0
    refused: int = 0
    blocks: int = 0


class PrefixImports:
    """The open imports of one replica."""

    def __init__(
        self,
        config: SchedulerConfig,
        index: ContentIndex,
        host: HostPool,
        tier: HostTier,
        manager: KVCacheManager,
        costs: CostModel,
    ) -> None:
        self._block_size = config.block_size
        self._is_of_use = config.enable_prefix_caching and config.num_host_blocks > 1
        self._max_num_blocks = config.num_host_blocks // 2
        self._index = index
        self._host = host
        self._tier = tier
        self._manager = manager
        self._costs = costs
        self._imports: dict[int, _Import] = {}
        self._orders: list[ImportOrder] = []
        self._released: list[Request] = []
        self._num_opened = 0
        self.counts = ImportCounts()

    def __len__(self) -> int:
        return len(self._imports)

    def hold(self, request: Request, transfer: PrefixTransfer, now: float) -> bool:
        """Fetch what a prompt lacks here. Whether the request has to wait for it."""
        if request.sequences[0].owes_prompt_logprobs:
            return False  # it computes its prompt whatever is cached
        num_tokens = min(transfer.num_tokens, request.num_prompt_tokens - 1)
        data = request.prompt[: num_tokens - num_tokens % self._block_size]
        prefix = SharedPrefix(request.root_hash, data.astype("<i4", copy=False).tobytes())
        entry = self._open(prefix, transfer, now)
        if entry is not None:
            entry.waiters.append(request)
        return entry is not None

    def open(
        self, prefix: SharedPrefix, transfer: PrefixTransfer, now: float, on_end: OnEnd
    ) -> bool:
        """Fetch a prefix that no request waits for; told at the end whether it is here. False:
        refused, or it is here already."""
        entry = self._open(prefix, transfer, now)
        if entry is not None:
            entry.watchers.append(on_end)
        return entry is not None

    def take_orders(self) -> list[ImportOrder]:
        """What is to be fetched since the last call."""
        orders, self._orders = self._orders, []
        return orders

    def take_released(self) -> list[Request]:
        """Who need not wait any longer, whatever became of it."""
        released, self._released = self._released, []
        return released

    def arrived(self, import_id: int, num_blocks: int) -> bool:
        """So many blocks are staged on every rank. False: they are of no use any more."""
        entry = self._imports.get(import_id)
        if entry is None or entry.is_copying:
            return False
        have, end = len(self._find(entry)), entry.first + num_blocks
        start = max(entry.first, have)
        blocks = None
        if entry.first <= have and start < end:
            blocks = self._host.begin_stores([None] * (end - start))
        if blocks is None:
            self._end(entry, ok=have >= end)
            return False
        entry.start, entry.blocks, entry.is_copying = start, blocks, True
        staged = start - entry.first
        self._tier.bring_in(entry.id, staged, blocks, lambda ok: self._copied(entry, ok))
        return True

    def fail(self, import_id: int) -> None:
        """It could not be fetched."""
        entry = self._imports.get(import_id)
        if entry is not None and not entry.is_copying:
            self._end(entry, ok=False)

    def expire(self, now: float) -> None:
        """Wait no longer for what is late. A copy within this host is waited for."""
        for entry in [e for e in self._imports.values() if e.expires_at <= now]:
            self.fail(entry.id)

    def void(self) -> None:
        """The cache is reset: what is on its way may not be used."""
        for entry in list(self._imports.values()):
            entry.is_void = True
            self.fail(entry.id)

    def held_blocks(self) -> Iterable[int]:
        """Host blocks being filled: one reference each."""
        for entry in self._imports.values():
            yield from entry.blocks

    def _open(self, prefix: SharedPrefix, transfer: PrefixTransfer, now: float) -> _Import | None:
        if not (self._is_of_use and self._costs.loads_pay):
            self.counts.refused += 1
            return None
        tokens = prefix.blocks(self._block_size)
        chain = HashChain(extend_chain(prefix.root_hash, tokens), tokens)
        entry = _Import(0, prefix.root_hash, chain, 0, now + transfer.timeout_s)
        entry.first = len(self._find(entry))
        if entry.first == len(tokens):
            return None  # it has come here by itself meanwhile
        for other in self._imports.values():
            if other.chain.hashes[other.first] == chain.hashes[entry.first]:
                return other
        if len(self._imports) >= MAX_NUM_IMPORTS or transfer.timeout_s <= 0.0:
            self.counts.refused += 1
            return None
        return self._order(entry, prefix, transfer)

    def _order(self, entry: _Import, prefix: SharedPrefix, transfer: PrefixTransfer) -> _Import:
        self._num_opened += 1
        entry.id = self._num_opened
        end = 4 * self._block_size * (entry.first + self._max_num_blocks)
        prefix = SharedPrefix(prefix.root_hash, prefix.token_bytes[:end])
        self._imports[entry.id] = entry
        self._orders.append(ImportOrder(entry.id, transfer, prefix, entry.first))
        self.counts.opened += 1
        return entry

    def _find(self, entry: _Import) -> list[Content]:
        root = self._index.root(entry.root_hash)
        return self._index.lookup(root, entry.chain.hashes, entry.chain.tokens)

    def _copied(self, entry: _Import, ok: bool) -> None:
        for block in entry.blocks:
            self._host.end_import(block)
        ok = ok and not entry.is_void and self._publish(entry)
        blocks, entry.blocks = entry.blocks, []
        self._host.release(blocks)
        self._end(entry, ok)

    def _publish(self, entry: _Import) -> bool:
        """Whether all of it can be found now."""
        found = self._find(entry)
        if len(found) < entry.start:
            return False  # what it follows has been dropped meanwhile
        parent = found[entry.start - 1] if entry.start else self._index.root(entry.root_hash)
        chain = entry.chain
        for place, block in enumerate(entry.blocks, entry.start):
            content = self._host.publish(block, parent, chain.hashes[place], chain.tokens[place])
            if content is None:
                return False
            self._manager.note_route(chain, place, content)
            self.counts.blocks += 1
            parent = content
        return True

    def _end(self, entry: _Import, ok: bool) -> None:
        del self._imports[entry.id]
        self.counts.done += ok
        self.counts.failed += not ok
        self._released += entry.waiters
        for on_end in entry.watchers:
            on_end(ok)
