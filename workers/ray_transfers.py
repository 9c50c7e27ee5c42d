"""Transfers of blocks over Ray: leaders talk by actor calls, shards go rank to rank through the
object store, where what has been read lies until it is brought into the host pool.

    this replica                      the source
    leader ──── open_export, close_export ────► leader
    rank r ──── read_shard, part by part ─────► rank r       r = 0 … n-1

Actors are found by name. Each wait has a time limit: a frozen process raises nothing in Ray.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import asyncio
import time
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from ..protos.messages import TransferPeer
from .block_staging import BlockBatch
from .block_storage import BlockStorage
from .prefix_mover import ExportGrant, ExportRequest, PrefixOffer, TransferFailed

T = TypeVar("T")

_PART_BYTES = 32 << 20  # of one rank in one read: the next is read while one is being taken
_SLACK_S = 0.5  # a rank's thread ends by itself so much later than the leader stops to wait
_MAX_NUM_HANDLES = 256


def read_shard(storage: BlockStorage, block_ids: tuple[int, ...]) -> BlockBatch:
    """On the source's rank: pinned blocks of its host pool."""
    return storage.read_host(np.array(block_ids, dtype=np.int32))


def fetch_shard(
    storage: BlockStorage,
    source_actor: str,
    import_id: int,
    block_ids: tuple[int, ...],
    timeout_s: float,
) -> None:
    """On this replica's rank: stage what the same rank of the source reads; blocks the thread."""
    until = time.monotonic() + timeout_s
    source = ray.get_actor(source_actor)
    size = max(1, _PART_BYTES // storage.layout.num_bytes)
    parts = [block_ids[at : at + size] for at in range(0, len(block_ids), size)]
    coming = [source.read_shard.remote(part) for part in parts[:1]]
    for number in range(len(parts)):
        coming += [source.read_shard.remote(part) for part in parts[number + 1 : number + 2]]
        batch = ray.get(coming[number], timeout=max(0.0, until - time.monotonic()))
        storage.staged.add(import_id, cast(BlockBatch, batch))


class RayTransferLink:
    """A `TransferLink` of one leader. own: names of its ranks' actors, the leader's first."""

    def __init__(self, storage: BlockStorage, own: tuple[str, ...]) -> None:
        self._storage = storage
        self._own = own
        self._threads = ThreadPoolExecutor(8, "pagefleet-transfers")
        self._handles: dict[str, ActorHandle[object]] = {}

    async def open_export(
        self, peer: TransferPeer, request: ExportRequest, timeout_s: float
    ) -> ExportGrant | None:
        """See TransferLink."""
        leader = await self._actor(peer.actors[0], timeout_s)
        return await _answer(leader.open_export.remote(request), timeout_s)

    async def fetch(
        self, peer: TransferPeer, import_id: int, blocks: tuple[int, ...], timeout_s: float
    ) -> None:
        """See TransferLink."""
        if len(peer.actors) != len(self._own):
            raise TransferFailed(f"{len(peer.actors)} ranks cannot serve {len(self._own)}")
        loop, limit_s = asyncio.get_running_loop(), timeout_s + _SLACK_S
        arguments = (self._storage, peer.actors[0], import_id, blocks, timeout_s)
        own = loop.run_in_executor(self._threads, fetch_shard, *arguments)
        calls: list[Awaitable[object]] = [_answer(own, limit_s)]
        for name, source in zip(self._own[1:], peer.actors[1:], strict=True):
            rank = await self._actor(name, timeout_s)
            reply = rank.fetch_shard.remote(source, import_id, blocks, timeout_s)
            calls.append(_answer(reply, limit_s))
        await asyncio.gather(*calls)

    async def close_export(self, peer: TransferPeer, export_id: int, timeout_s: float) -> bool:
        """See TransferLink."""
        leader = await self._actor(peer.actors[0], timeout_s)
        return await _answer(leader.close_export.remote(export_id), timeout_s)

    async def forget(self, import_id: int) -> None:
        """See TransferLink."""
        self._storage.staged.take(import_id)
        for name in self._own[1:]:
            rank = await self._actor(name, 1.0)
            rank.forget_staged.remote(import_id)

    async def offer(self, peer: TransferPeer, offer: PrefixOffer, timeout_s: float) -> bool:
        """See TransferLink."""
        leader = await self._actor(peer.actors[0], timeout_s)
        return await _answer(leader.take_over.remote(offer), timeout_s)

    def close(self) -> None:
        """Nothing is waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _actor(self, name: str, timeout_s: float) -> "ActorHandle[object]":
        """By its name, which Ray's head has to be asked for the first time."""
        handle = self._handles.get(name)
        if handle is None:
            if len(self._handles) >= _MAX_NUM_HANDLES:
                self._handles.clear()
            loop = asyncio.get_running_loop()
            found = loop.run_in_executor(self._threads, ray.get_actor, name)
            handle = self._handles[name] = await _answer(found, timeout_s)
        return handle


async def _answer(reply: object, timeout_s: float) -> T:  # pyright: ignore[reportInvalidTypeVarUse]
    """Of an actor call or of a thread of ours, which Ray leaves untyped."""
    try:
        return cast(T, await asyncio.wait_for(cast(Awaitable[object], reply), timeout_s))
    except (RayError, TimeoutError, ValueError) as error:  # ValueError: no actor of that name
        raise TransferFailed(repr(error)) from error
