"""Where a lease stands once it has been given."""

import pytest
from cluster_factories import join, make_controller, make_hashes, make_info, make_request, tell

from pagefleet.cluster.admission import Need
from pagefleet.cluster.model_pool import ModelPool
from pagefleet.cluster.prefix_transfer import NOWHERE

NEED = Need(5, 16, 16.0)


def make_pool() -> ModelPool:
    """One replica that computes 1,000 tokens a second and decodes a hundred."""
    controller = make_controller()
    tell(controller, join(controller, make_info()), 0.5)
    return controller.pools()["m"]


def test_a_lease_is_booked_in_the_ledger_the_index_the_counts_and_the_turns() -> None:
    pool, hashes = make_pool(), make_hashes(4)
    request = make_request(route_hashes=hashes, tenant="t")
    grant = pool.granter.grant(request, NEED, 0, 0.0, NOWHERE, 1.0)
    assert (grant.lease.replica_id, grant.lease.num_blocks) == ("r0", 5)
    assert grant.lease.expected_hit_tokens == 0
    assert list(pool.pool.leases) == [grant.record]
    assert pool.pool.index.device_depths(hashes, 1).tolist() == [4]
    assert pool.pool.by_slot[0].granted_blocks == 5
    assert grant.record.expected_end == pytest.approx(1.0 + 0.064 + 0.16)
    assert grant.record.charged == pytest.approx(5 * 0.224)
    assert pool.granter.num_granted == 1
    pool.check_integrity()


def test_work_before_it_delays_its_end() -> None:
    pool = make_pool()
    first = pool.granter.grant(make_request(), NEED, 0, 0.0, NOWHERE, 1.0)
    second = pool.granter.grant(make_request(), NEED, 0, 0.0, NOWHERE, 1.0)
    assert second.record.expected_end == pytest.approx(first.record.expected_end + 0.064)


def test_the_last_token_is_always_computed() -> None:
    pool = make_pool()
    grant = pool.granter.grant(make_request(), NEED, 0, 64.0, NOWHERE, 1.0)
    assert grant.record.uncached_tokens == 1 and grant.lease.expected_hit_tokens == 63


def test_no_two_leases_have_the_same_number() -> None:
    pool = make_pool()
    grants = [pool.granter.grant(make_request(), NEED, 0, 0.0, NOWHERE, 1.0) for _ in range(9)]
    assert len({grant.lease.lease_id for grant in grants}) == 9
