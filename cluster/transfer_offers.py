"""Leases that name another replica to copy a part of the prompt from: which, and how much.

Knows one model's replicas and what each holds for certain; what copying costs is
`prefix_transfer`'s. Offers nothing where nobody exchanges blocks.
"""

from dataclasses import dataclass

import numpy as np

from ..protos.messages import PrefixTransfer, ReserveRequest, TransferPeer
from .prefix_transfer import NOWHERE, Source, TransferConfig, price_fetches
from .replica_pool import ReplicaPool
from .replica_view import ReplicaView


@dataclass(frozen=True, slots=True)
class TransferOffer:
    """What a lease says of it, and the tokens that then need no computing."""

    transfer: PrefixTransfer
    num_tokens: int


class TransferOffers:
    """The offers of one model's pool."""

    def __init__(self, config: TransferConfig, pool: ReplicaPool) -> None:
        self._config = config
        self._pool = pool

    @property
    def is_possible(self) -> bool:
        """Whether there are replicas that exchange blocks."""
        return self._config.enabled and self._pool.columns.exchanging.bit_count() > 1

    def source_of(self, request: ReserveRequest) -> Source:
        """Who holds most of the prompt, on either tier; what is only expected does not count."""
        if not self.is_possible:
            return NOWHERE
        among = self._pool.columns.exchanging
        for replica_id in request.excluded:
            view = self._pool.replicas.get(replica_id)
            if view is not None:
                among &= ~(1 << view.slot)
        slot, num_tokens = self._pool.fullest_cache(request.route_hashes, among)
        if not num_tokens:
            return NOWHERE
        return Source(slot, min(num_tokens, request.num_tokens - 1.0))

    def offer(
        self, source: Source, slot: int, hit_tokens: float, now: float
    ) -> TransferOffer | None:
        """For a request that goes to a slot; books the time of both links."""
        if source.slot in (slot, NOWHERE.slot):
            return None
        links = self._pool.columns.links
        fetches = price_fetches(
            self._config,
            links,
            source.slot,
            source.num_tokens,
            np.array([hit_tokens]),
            slice(slot, slot + 1),
            now,
        )
        num_tokens, seconds = int(fetches.tokens[0]), float(fetches.seconds[0])
        if not num_tokens:
            return None
        for one in (slot, source.slot):
            links.busy_until[one] = max(float(links.busy_until[one]), now + seconds)
        self._pool.by_slot[slot].transfers_offered += 1
        compute_s = num_tokens * float(links.token_s[slot])
        wait_s = min(max(compute_s, self._config.min_wait_s), self._config.max_wait_s)
        peer = peer_of(self._pool.by_slot[source.slot])
        return TransferOffer(PrefixTransfer(peer, int(source.num_tokens), wait_s), num_tokens)

    def peers_of(self, view: ReplicaView) -> tuple[TransferPeer, ...]:
        """Who could take over the cache of a replica that goes, emptiest first."""
        columns = self._pool.columns
        group = int(columns.exchange[view.slot])
        if not group or not self._config.enabled:
            return ()
        others = [
            other
            for other in self._pool.by_slot.values()
            if other is not view
            and columns.open[other.slot]
            and columns.exchange[other.slot] == group
        ]
        others.sort(key=lambda other: -int(columns.available[other.slot]))
        return tuple(peer_of(other) for other in others)


def peer_of(view: ReplicaView) -> TransferPeer:
    """How another replica finds it."""
    return TransferPeer(view.info.replica_id, view.info.incarnation, view.info.actors)
