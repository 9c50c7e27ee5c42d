"""Prefixes that go from one replica's host tier to another's: two schedulers, no transport."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes import Uint64Array, fake_blocks
from scheduler_harness import Cluster, make_request

from pagefleet.protos.messages import EngineRequest, PrefixTransfer, TransferPeer
from pagefleet.scheduler.prefix_exports import MAX_NUM_EXPORTS, SharedPrefix
from pagefleet.scheduler.prefix_imports import MAX_NUM_IMPORTS, ImportOrder

PEER = TransferPeer("other", "life", ("actor",))
PROMPT = list(range(1, 23))  # five blocks of 4 and two tokens


def make_cluster(**config: object) -> Cluster:
    return Cluster(**{"block_size": 4, "num_blocks": 32, "num_host_blocks": 32, **config})  # type: ignore[arg-type]


def make_source(**config: object) -> Cluster:
    """A replica that has computed PROMPT."""
    source = make_cluster(**config)
    source.add(PROMPT)
    source.run()
    return source


def with_transfer(num_tokens: int = 22, timeout_s: float = 1.0, **fields: object) -> EngineRequest:
    request = make_request(fields.pop("prompt", PROMPT), **fields)  # type: ignore[arg-type]
    return replace(request, transfer=PrefixTransfer(PEER, num_tokens, timeout_s))


def submit(cluster: Cluster, **fields: object) -> tuple[EngineRequest, ImportOrder]:
    """A request whose prefix is to be fetched."""
    request = cluster.submit(with_transfer(**fields))  # type: ignore[arg-type]
    (order,) = cluster.scheduler.imports.take_orders()
    return request, order


class Reading:
    """One export, and what is read of it."""

    def __init__(self, source: Cluster, prefix: SharedPrefix, first: int = 0) -> None:
        self.source = source
        self.blocks: tuple[int, ...] | None = None
        self.id = source.scheduler.exports.open(prefix, first, source.now, 1.0, self._ready)
        source.scheduler.check_integrity()
        for _ in range(5):
            source.step()

    def _ready(self, blocks: tuple[int, ...]) -> None:
        self.blocks = blocks

    def read(self) -> Uint64Array:
        assert self.blocks is not None
        return self.source.model.host[list(self.blocks)].copy()

    def close(self) -> bool:
        assert self.id is not None
        held = self.source.scheduler.exports.close(self.id)
        self.source.scheduler.check_integrity()
        return held


def deliver(target: Cluster, order: ImportOrder, staged: Uint64Array) -> bool:
    target.model.staged[order.import_id] = staged
    arrived = target.scheduler.imports.arrived(order.import_id, len(staged))
    target.scheduler.check_integrity()
    return arrived


def test_what_another_replica_computed_is_a_hit() -> None:
    source, target = make_source(), make_cluster()
    request, order = submit(target)
    assert not target.step()  # it waits, and nobody computes
    reading = Reading(source, order.prefix, order.first)
    staged = reading.read()
    assert reading.close()
    assert deliver(target, order, staged)
    target.run()
    target.assert_oracle(request)
    assert target.cached_tokens(request) == 20
    assert target.model.num_computed_tokens == 2 + 3  # the rest of the prompt, and its outputs
    source.assert_idle()
    target.assert_idle()


def test_imports_are_told_to_routers() -> None:
    source, target = make_source(), make_cluster()
    _, order = submit(target)
    staged = Reading(source, order.prefix).read()
    deliver(target, order, staged)
    target.step()
    source_events, _, _ = source.scheduler.route_snapshot()
    target_events, _, _ = target.scheduler.route_snapshot()
    assert set(target_events.stored_host) == set(source_events.stored_host)
    assert len(target_events.stored_host) == 5


def test_only_what_is_missing_is_fetched() -> None:
    source, target = make_source(), make_cluster()
    first = target.add(PROMPT[:9])
    target.run()
    request, order = submit(target)
    assert order.first == 2
    staged = Reading(source, order.prefix, order.first).read()
    assert len(staged) == 3
    deliver(target, order, staged)
    target.run()
    target.assert_oracle(first, request)
    assert target.cached_tokens(request) == 20


def test_what_is_here_is_not_fetched() -> None:
    target = make_source()
    request = target.submit(with_transfer())
    assert target.scheduler.imports.take_orders() == []
    target.run()
    assert target.cached_tokens(request) == 20


def test_who_wants_the_same_prefix_waits_for_the_one_fetch() -> None:
    source, target = make_source(), make_cluster()
    one, order = submit(target)
    two = target.submit(with_transfer(max_tokens=2))
    assert target.scheduler.imports.take_orders() == []
    deliver(target, order, Reading(source, order.prefix).read())
    target.run()
    target.assert_oracle(one, two)
    assert target.cached_tokens(two) == 20


@pytest.mark.parametrize("end", ["failed", "late", "reset", "copy failed", "aborted"])
def test_without_the_blocks_it_is_computed(end: str) -> None:
    source, target = make_source(), make_cluster()
    request, order = submit(target)
    staged = Reading(source, order.prefix).read()
    match end:
        case "failed":
            target.scheduler.imports.fail(order.import_id)
        case "late":
            target.now += 1.5
        case "reset":
            target.scheduler.reset_prefix_cache()
        case "copy failed":
            assert deliver(target, order, staged)
            target.model.hold_copies = True
            target.step()
            target.scheduler.copies_done(target.model.finish_copies(ok=False))
            target.model.hold_copies = False
        case _:
            target.scheduler.abort_request(request.request_key)
            assert not target.scheduler.has_unfinished()
            target.scheduler.imports.fail(order.import_id)
            target.run()
            target.assert_idle()
            return
    target.run()
    assert end == "copy failed" or not deliver(target, order, staged)  # too late
    target.assert_oracle(request)
    assert target.cached_tokens(request) == 0
    target.assert_idle()
    assert target.scheduler.imports.counts.failed == 1


def test_a_reset_during_the_copy_publishes_nothing() -> None:
    source, target = make_source(), make_cluster()
    request, order = submit(target)
    target.model.hold_copies = True
    assert deliver(target, order, Reading(source, order.prefix).read())
    target.step()
    target.scheduler.reset_prefix_cache()
    target.scheduler.copies_done(target.model.finish_copies())
    target.model.hold_copies = False
    target.run()
    target.assert_oracle(request)
    assert target.cached_tokens(request) == 0
    target.assert_idle()


def test_what_the_blocks_follow_is_gone() -> None:
    """A prefix without its predecessors can never be found: it is not published."""
    source = make_source()
    target = make_cluster(num_blocks=8, num_host_blocks=16, write_back_blocks=0)
    target.add(PROMPT[:9])
    target.run()
    request, order = submit(target)
    staged = Reading(source, order.prefix, order.first).read()
    other = target.add([9] * 30, max_tokens=1)  # drives the two blocks out
    while target.sample(other).finish_reason is None:
        target.step()
    assert not deliver(target, order, staged)
    target.run()
    target.assert_oracle(request, other)


def test_a_full_host_tier_refuses() -> None:
    target = make_cluster(num_host_blocks=6)
    target.model.hold_copies = True
    for start in (100, 200, 300):
        target.submit(with_transfer(prompt=list(range(start, start + 14))))
    orders = target.scheduler.imports.take_orders()
    blocks = [fake_blocks(order.prefix.token_bytes, 4) for order in orders]
    assert [len(staged) for staged in blocks] == [3, 3, 3]
    arrived = [deliver(target, *pair) for pair in zip(orders, blocks, strict=True)]
    assert arrived == [True, True, False]
    target.step()
    target.scheduler.copies_done(target.model.finish_copies())
    target.model.hold_copies = False
    target.run()
    target.assert_oracle()
    target.assert_idle()


def test_no_more_is_fetched_than_half_of_the_host_tier() -> None:
    target = make_cluster(num_host_blocks=6)
    _, order = submit(target)
    assert len(order.prefix.token_bytes) == 4 * 4 * 3


def test_fetches_are_bounded_in_number() -> None:
    target = make_cluster()
    for start in range(MAX_NUM_IMPORTS + 1):
        target.submit(with_transfer(prompt=list(range(100 * start, 100 * start + 9)), max_tokens=1))
    assert len(target.scheduler.imports.take_orders()) == MAX_NUM_IMPORTS
    assert target.scheduler.imports.counts.refused == 1
    target.now += 2.0
    target.run()
    target.assert_oracle()
    target.assert_idle()


# ── the other side ────────────────────────────────────────────────────────────────────────────


def prefix_of(cluster: Cluster, tokens: list[int]) -> SharedPrefix:
    request = cluster.submit(with_transfer(prompt=tokens, max_tokens=1))
    (order,) = cluster.scheduler.imports.take_orders()
    cluster.scheduler.abort_request(request.request_key)
    return order.prefix


def test_a_source_pins_what_is_read() -> None:
    source = make_source(num_host_blocks=10)
    reading = Reading(source, prefix_of(make_cluster(), PROMPT))
    assert source.scheduler.stats().host.referenced == 5
    before = reading.read()
    # as much as all of both tiers, so that everything else is driven out
    for start in range(6):
        source.add(list(range(1000 * start, 1000 * start + 60)), max_tokens=1)
    source.run()
    assert np.array_equal(reading.read(), before)
    assert reading.close()
    assert not reading.close()
    assert source.scheduler.stats().host.referenced == 0


def test_an_export_that_is_not_closed_ends_with_its_time() -> None:
    source = make_source()
    reading = Reading(source, prefix_of(make_cluster(), PROMPT))
    source.now += 1.5
    source.step()
    assert source.scheduler.stats().host.referenced == 0
    assert not reading.close()


def test_a_reset_voids_what_is_being_read() -> None:
    source = make_source()
    reading = Reading(source, prefix_of(make_cluster(), PROMPT))
    source.scheduler.reset_prefix_cache()
    source.scheduler.check_integrity()
    assert not reading.close()
    source.assert_idle()


def test_a_store_that_fails_is_told() -> None:
    source = make_source()
    source.model.hold_copies = True
    reading = Reading(source, prefix_of(make_cluster(), PROMPT))
    source.scheduler.copies_done(source.model.finish_copies(ok=False))
    source.scheduler.check_integrity()
    assert reading.blocks == ()
    assert not reading.close()
    source.assert_idle()


def test_what_the_source_lacks_is_refused() -> None:
    source = make_source()
    assert Reading(source, prefix_of(make_cluster(), [7] * 20)).id is None
    longer = Reading(source, prefix_of(make_cluster(), [*PROMPT[:12], *[7] * 12]))
    assert longer.blocks is not None and len(longer.blocks) == 3


def test_without_room_on_the_host_what_is_there_is_exported() -> None:
    source = make_source(num_host_blocks=4)
    reading = Reading(source, prefix_of(make_cluster(), PROMPT))
    assert reading.blocks is not None and len(reading.blocks) == 2  # half of the tier
    again = Reading(source, prefix_of(make_cluster(), PROMPT))
    assert again.id is None


def test_exports_are_bounded_in_number() -> None:
    source, prefix = make_source(num_host_blocks=200), prefix_of(make_cluster(), PROMPT)
    readings = [Reading(source, prefix) for _ in range(MAX_NUM_EXPORTS + 1)]
    assert [reading.id is None for reading in readings] == [False] * MAX_NUM_EXPORTS + [True]


def test_other_salts_and_weights_share_nothing() -> None:
    target = make_cluster()
    request, order = submit(target, cache_salt="mine")
    assert Reading(make_source(), order.prefix).id is None
    target.scheduler.imports.fail(order.import_id)
    target.run()
    target.assert_oracle(request)
