"""Transfers of prefixes for the scheduler's fuzzer: a peer whose blocks are always right, but that
comes late, brings less, fails or never answers; and readers who look at what is exported to them.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from fakes import fake_blocks
from scheduler_harness import Cluster

from pagefleet.protos.messages import CacheIdentity, EngineRequest, PrefixTransfer, TransferPeer
from pagefleet.scheduler.block_hash import root_hash
from pagefleet.scheduler.prefix_exports import SharedPrefix
from pagefleet.scheduler.prefix_imports import ImportOrder

TRANSFER_COUNTS = ("imports_done", "imports_failed", "blocks_imported", "exports_read")


def random_transfer(chance: random.Random, request: EngineRequest) -> PrefixTransfer | None:
    """A peer that has some of the prompt, for half of the requests."""
    if chance.random() < 0.5:
        return None
    num_tokens = chance.randrange(len(request.prompt_token_ids) + 1)
    return PrefixTransfer(TransferPeer("peer", "life", ("actor",)), num_tokens, chance.random())


class Transfers:
    """What is on its way to and from one scheduler."""

    def __init__(self, cluster: Cluster, chance: random.Random) -> None:
        self._cluster = cluster
        self._chance = chance
        self._orders: list[ImportOrder] = []
        self._exports: dict[int, tuple[SharedPrefix, int, list[tuple[int, ...]]]] = {}
        self._num_read = 0

    @property
    def counts(self) -> dict[str, int]:
        imports = self._cluster.scheduler.imports.counts
        counts = (imports.done, imports.failed, imports.blocks, self._num_read)
        return dict(zip(TRANSFER_COUNTS, counts, strict=True))

    def act(self, identity: CacheIdentity, prompt: list[int]) -> None:
        """Bring something in, or begin or end to read."""
        self._orders += self._cluster.scheduler.imports.take_orders()
        dice = self._chance.random()
        if self._orders and dice < 0.6:
            self._answer(self._orders.pop(self._chance.randrange(len(self._orders))))
        elif self._exports and dice < 0.8:
            self._close(self._chance.choice(list(self._exports)))
        else:
            self._open(replace(identity, salt=self._chance.choice(("", "other"))), prompt)
        self._cluster.scheduler.check_integrity()

    def end(self) -> None:
        """Nobody answers any more, and all readers leave."""
        for export_id in list(self._exports):
            self._close(export_id)

    def _answer(self, order: ImportOrder) -> None:
        imports = self._cluster.scheduler.imports
        dice = self._chance.random()
        if dice < 0.1:
            return  # it never answers
        if dice < 0.2:
            imports.fail(order.import_id)
            return
        size = self._cluster.scheduler.config.block_size
        staged = fake_blocks(order.prefix.token_bytes, size)[order.first :]
        count = len(staged) if dice < 0.8 else self._chance.randrange(len(staged) + 1)
        self._cluster.model.staged[order.import_id] = staged[:count]
        imports.arrived(order.import_id, count)

    def _open(self, identity: CacheIdentity, prompt: list[int]) -> None:
        tokens = np.array(prompt, dtype="<i4")
        prefix = SharedPrefix(root_hash(identity), tokens.tobytes())
        first, ready = self._chance.choice((0, 0, 1)), list[tuple[int, ...]]()
        exports, ttl_s = self._cluster.scheduler.exports, 0.5 * self._chance.random()
        export_id = exports.open(prefix, first, self._cluster.now, ttl_s, ready.append)
        if export_id is not None:
            self._exports[export_id] = prefix, first, ready

    def _close(self, export_id: int) -> None:
        """What was read counts only if it was held all the while."""
        prefix, first, ready = self._exports.pop(export_id)
        read = self._cluster.model.host[list(ready[0])].copy() if ready else None
        if not self._cluster.scheduler.exports.close(export_id):
            return
        assert read is not None, f"export {export_id} ended well and was never ready"
        expected = fake_blocks(_whole(prefix, self._cluster), read.shape[1])
        assert np.array_equal(read, expected[first : first + len(read)]), f"export {export_id}"
        self._num_read += 1


def _whole(prefix: SharedPrefix, cluster: Cluster) -> bytes:
    size = 4 * cluster.scheduler.config.block_size
    return prefix.token_bytes[: len(prefix.token_bytes) // size * size]
