"""Prefixes on their way between replicas, as a leader sees it: asks, fetches, confirms, lets go.

    order ─► the source pins ─► every rank reads its shard into staging ─► was it pinned all the
             while? ─► the scheduler brings it in │ whatever fails: it is computed here instead

Lives on the leader's loop. Everything has a time limit. Knows neither Ray, which is behind
`TransferLink`, nor what a block holds; what becomes of blocks is the scheduler's.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ..protos.errors import Unavailable
from ..protos.messages import PrefixTransfer, TransferPeer, TransferStats
from ..scheduler.prefix_exports import SharedPrefix
from ..scheduler.prefix_imports import ImportOrder
from ..scheduler.scheduler import Scheduler
from .engine import Engine

logger = logging.getLogger(__name__)

T = TypeVar("T")

_WEIGHT = 0.2  # of a new measurement in the running means
_CALL_S = 2.0  # for words about a transfer, which carry no blocks
_SAVE_S = 3.0  # how long a peer may take over one prefix of a replica that goes
_MAX_EXPORT_S = 10.0
_SAVED_AT_ONCE = 2


class TransferFailed(Exception):
    """The other replica, or a rank, did not answer, or not in time."""


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """One leader to another: pin what you have of a prefix, from block number `first` on."""

    incarnation: str
    prefix: SharedPrefix
    first: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class ExportGrant:
    """The answer. blocks: of the source's host tier, in order, the same on all its ranks."""

    export_id: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefixOffer:
    """A replica that goes to another: this prefix is worth keeping, fetch it from me."""

    prefix: SharedPrefix
    transfer: PrefixTransfer


class TransferLink(Protocol):
    """Other replicas and the own ranks, however they are reached. Every call may raise
    TransferFailed and has ended by `timeout_s`."""

    async def open_export(
        self, peer: TransferPeer, request: ExportRequest, timeout_s: float
    ) -> ExportGrant | None:
        """Ask a peer's leader to pin; None: it has nothing of it, or no room."""
        ...

    async def fetch(
        self, peer: TransferPeer, import_id: int, blocks: tuple[int, ...], timeout_s: float
    ) -> None:
        """Have every own rank stage its shard, each from the same rank of the peer."""
        ...

    async def close_export(self, peer: TransferPeer, export_id: int, timeout_s: float) -> bool:
        """Let the peer unpin; whether all was pinned until now."""
        ...

    async def forget(self, import_id: int) -> None:
        """Have every own rank drop what it has staged."""
        ...

    async def offer(self, peer: TransferPeer, offer: PrefixOffer, timeout_s: float) -> bool:
        """Let a peer take over a prefix; whether it has done so."""
        ...


class PrefixMover:
    """Moves prefixes to and from one replica."""

    def __init__(
        self,
        engine: Engine,
        link: TransferLink,
        own: TransferPeer,
        block_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._link = link
        self._own = own
        self._block_bytes = block_bytes
        self._clock = clock
        self._tasks: set[asyncio.Task[object]] = set()
        self._num_bytes = 0
        self._seconds = 0.0
        self._bytes_per_s = 0.0
        self._overhead_s = 0.0

    def stats(self) -> TransferStats:
        """For reports."""
        counts = self._engine.import_counts
        return TransferStats(
            done=counts.done,
            failed=counts.failed,
            blocks=counts.blocks,
            num_bytes=self._num_bytes,
            seconds=self._seconds,
            bytes_per_s=self._bytes_per_s,
            overhead_s=self._overhead_s,
        )

    # -- in --------------------------------------------------------------------------------

    def begin(self, order: ImportOrder) -> None:
        """Fetch what the scheduler wants. On the loop."""
        self._spawn(self._bring_in(order))

    async def take_over(self, offer: PrefixOffer) -> bool:
        """Fetch what a peer that goes has offered; whether it is here now."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[bool] = loop.create_future()

        def tell(ok: bool) -> None:
            loop.call_soon_threadsafe(_set_unless_done, ended, ok)

        prefix, transfer = offer.prefix, offer.transfer
        if not await self._call(lambda s: s.imports.open(prefix, transfer, self._clock(), tell)):
            return False
        return await ended  # it ends by itself, in its time

    async def _bring_in(self, order: ImportOrder) -> None:
        number, num_blocks = order.import_id, 0
        try:
            async with asyncio.timeout(order.transfer.timeout_s):
                num_blocks = await self._fetch(order)
        except (TransferFailed, TimeoutError) as error:
            source = order.transfer.source.replica_id
            logger.info("transfer %d from %s failed: %r", number, source, error)
        if num_blocks:
            is_taken = await self._call(lambda s: s.imports.arrived(number, num_blocks))
            if is_taken:
                return
        else:
            await self._call(lambda s: s.imports.fail(number))
        with contextlib.suppress(TransferFailed):  # a rank that is gone keeps nothing
            await self._link.forget(number)

    async def _fetch(self, order: ImportOrder) -> int:
        """How many blocks are staged on every rank, as they were sent."""
        transfer, began = order.transfer, self._clock()
        peer, timeout_s = transfer.source, transfer.timeout_s
        request = ExportRequest(peer.incarnation, order.prefix, order.first, 2.0 * timeout_s)
        grant = await self._link.open_export(peer, request, timeout_s)
        if grant is None:
            return 0
        opened = self._clock()
        try:
            left_s = timeout_s - (opened - began)
            await self._link.fetch(peer, order.import_id, grant.blocks, left_s)
        except BaseException:
            self._spawn(self._let_go(peer, grant.export_id))
            raise
        fetched = self._clock()
        if not await self._link.close_export(peer, grant.export_id, _CALL_S):
            return 0
        self._observe(len(grant.blocks), fetched - opened, self._clock() - began)
        return len(grant.blocks)

    async def _let_go(self, peer: TransferPeer, export_id: int) -> None:
        try:
            await self._link.close_export(peer, export_id, _CALL_S)
        except TransferFailed:
            logger.info("%s has to unpin export %d by itself", peer.replica_id, export_id)

    def _observe(self, num_blocks: int, read_s: float, total_s: float) -> None:
        num_bytes = num_blocks * self._block_bytes
        self._num_bytes += num_bytes
        self._seconds += total_s
        rate, overhead_s = num_bytes / max(read_s, 1e-6), total_s - read_s
        if not self._bytes_per_s:
            self._bytes_per_s, self._overhead_s = rate, overhead_s
        self._bytes_per_s += _WEIGHT * (rate - self._bytes_per_s)
        self._overhead_s += _WEIGHT * (overhead_s - self._overhead_s)

    # -- out -------------------------------------------------------------------------------

    async def open_export(self, request: ExportRequest) -> ExportGrant | None:
        """Pin what another replica asks for, and tell it where that is."""
        if request.incarnation != self._own.incarnation:
            return None
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[tuple[int, ...]] = loop.create_future()

        def tell(blocks: tuple[int, ...]) -> None:
            loop.call_soon_threadsafe(_set_unless_done, ready, blocks)

        ttl_s = min(request.ttl_s, _MAX_EXPORT_S)
        prefix, first = request.prefix, request.first
        export_id = await self._call(
            lambda s: s.exports.open(prefix, first, self._clock(), ttl_s, tell)
        )
        if export_id is None:
            return None
        try:
            blocks = await asyncio.wait_for(ready, ttl_s)
        except TimeoutError:
            blocks = ()
        if not blocks:
            await self.close_export(export_id)
            return None
        return ExportGrant(export_id, blocks)

    async def close_export(self, export_id: int) -> bool:
        """Unpin; whether all was held until now."""
        return bool(await self._call(lambda s: s.exports.close(export_id)))

    async def save(self, peers: tuple[TransferPeer, ...], limit_s: float) -> int:
        """Have the peers take over the hottest prefixes, within a time; how many they have."""
        prefixes = await self._call(lambda s: s.exports.hottest())
        if not prefixes or not peers:
            return 0
        slots = asyncio.Semaphore(_SAVED_AT_ONCE)

        async def offer(place: int, prefix: SharedPrefix) -> bool:
            num_tokens = len(prefix.token_bytes) // 4
            transfer = PrefixTransfer(self._own, num_tokens, min(_SAVE_S, limit_s))
            async with slots:
                peer = peers[place % len(peers)]
                try:
                    return await self._link.offer(peer, PrefixOffer(prefix, transfer), _SAVE_S)
                except TransferFailed:
                    return False

        tasks = [asyncio.create_task(offer(*entry)) for entry in enumerate(prefixes)]
        done, late = await asyncio.wait(tasks, timeout=limit_s)
        for task in late:
            task.cancel()
        return sum(task.result() for task in done)

    # -- both ------------------------------------------------------------------------------

    async def _call(self, function: Callable[[Scheduler], T]) -> T | None:
        """Between two steps; None where the engine has ended."""
        try:
            return await asyncio.wrap_future(self._engine.call(function))
        except Unavailable:
            return None

    def _spawn(self, work: Coroutine[object, object, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _set_unless_done(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)
