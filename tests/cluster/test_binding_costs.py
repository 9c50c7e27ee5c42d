"""Each term of what a pair of request and replica costs, and when none is cheap enough."""

import numpy as np
import pytest
from cluster_factories import make_columns

from pagefleet.cluster.binding_costs import BindingCosts, Contenders, LateBindingConfig
from pagefleet.cluster.replica_view import ReplicaColumns

CONFIG = LateBindingConfig()
TOKENS = 100.0


def costs_of(
    columns: ReplicaColumns,
    hits: list[float],
    on_host: list[float] | None = None,
    *,
    tokens: float = TOKENS,
    source: tuple[int, float] | None = None,
    may_wait: bool = True,
) -> list[float]:
    """Of one request that needs 10 blocks for a second."""
    host = None if on_host is None else np.array(on_host)
    alone = Contenders(tokens, 10, 1.0, np.array(hits), host, source, may_wait)
    return BindingCosts(CONFIG).of_pairs(alone, columns, slice(None), 0.0).tolist()


def test_prefill_counts_where_it_is_not_cached_and_once_more_where_it_is_elsewhere() -> None:
    assert costs_of(make_columns(2), [0.0, 60.0]) == pytest.approx([0.10 + 0.06, 0.04])


def test_a_closed_replica_saves_nobody_anything() -> None:
    columns = make_columns(2, open=[True, False])
    assert costs_of(columns, [0.0, 60.0])[0] == pytest.approx(0.10)


def test_prefill_counts_only_up_to_the_cap() -> None:
    assert costs_of(make_columns(1), [0.0], tokens=5000.0) == [CONFIG.size_cap_s]


def test_what_the_host_tier_holds_is_loaded_instead_of_computed() -> None:
    columns = make_columns(2, load_token_s=[1e-4, 1e-4])
    # 50 of 100 tokens to load; the other replica does work again that is cached here
    assert costs_of(columns, [0.0, 0.0], [50.0, 0.0]) == pytest.approx([0.055, 0.15])


def test_the_last_token_is_computed_whatever_the_host_tier_holds() -> None:
    columns = make_columns(1, load_token_s=[0.0])
    assert costs_of(columns, [40.0], [60.0]) == pytest.approx([0.001])


def test_a_full_pool_costs_and_more_so_where_blocks_are_scarce() -> None:
    columns = make_columns(2)
    columns.set_available(0, 50)
    columns.set_available(1, 5)
    crowded = 0.1 + 0.5 * CONFIG.crowding_s
    above = 0.95 - CONFIG.scarcity_from
    scarcity_s = CONFIG.scarcity_weight / (1.0 - CONFIG.scarcity_from) * above * 0.1
    scarce = 0.1 + 0.95 * CONFIG.crowding_s + scarcity_s
    assert costs_of(columns, [0.0, 0.0]) == pytest.approx([crowded, scarce])


def test_a_copy_takes_the_place_of_the_work_that_it_saves() -> None:
    columns = make_columns(2, fetch_token_s=[1e-4, 1e-4], fetch_overhead_s=[0.002, 0.002])
    for slot in range(2):
        columns.set_exchange(slot, 1)
    without = costs_of(columns, [0.0, 80.0])
    assert without == pytest.approx([0.18, 0.02])
    copied = costs_of(columns, [0.0, 80.0], source=(1, 80.0))
    assert copied == pytest.approx([0.02 + 0.002 + 0.008, 0.02])
    for slot in range(2):  # a second copy would drive out something else
        columns.set_available(slot, 10)
    full = costs_of(columns, [0.0, 80.0], source=(1, 80.0))
    assert full == costs_of(columns, [0.0, 80.0])


def test_nothing_is_cheap_enough_where_a_busy_replica_would_still_be_sooner() -> None:
    columns = make_columns(2, work_end=[0.0, 0.05])
    assert costs_of(columns, [0.0, 99.0])[0] == np.inf
    assert costs_of(columns, [0.0, 99.0], may_wait=False)[0] < np.inf
    columns.work_end[1] = 5.0
    assert costs_of(columns, [0.0, 99.0])[0] < np.inf


def test_a_request_costs_the_same_alone_and_among_others() -> None:
    rng = np.random.default_rng(5)
    columns = make_columns(6, work_end=[0.0, 0.3, 0.0, 0.0, 0.1, 0.0])
    hits = (100 * rng.random((4, 6)) * rng.integers(0, 2, (4, 6))).round()
    tokens, needs, durations = np.full((4, 1), TOKENS), np.full((4, 1), 10), np.ones((4, 1))
    together = Contenders(tokens, needs, durations, hits, None)
    slots = np.array([0, 2, 5])
    costs = BindingCosts(CONFIG).of_pairs(together, columns, slots, 0.0)
    for row in range(4):
        alone = costs_of(columns, hits[row].tolist())
        assert costs[row].tolist() == [alone[slot] for slot in slots.tolist()]
