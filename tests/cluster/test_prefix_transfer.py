"""When a prefix is copied from another replica instead of computed: prices, leases, `Explain`."""

from dataclasses import replace

import numpy as np
import pytest
from cluster_factories import (
    FakeReplica,
    join,
    make_controller,
    make_hashes,
    make_info,
    make_request,
    tell,
)

from pagefleet.cluster.binding_costs import LateBindingConfig
from pagefleet.cluster.controller import Controller
from pagefleet.cluster.metrics import GatewayMetrics
from pagefleet.cluster.prefix_transfer import (
    NOWHERE,
    Fetches,
    Links,
    TransferConfig,
    exchange_group,
    fetch_prices,
    price_fetches,
)
from pagefleet.cluster.proto_conversion import (
    cluster_state_to_proto,
    replica_explanation_to_proto,
)
from pagefleet.protos.messages import (
    AdmissionClass,
    Explanation,
    Lease,
    ReserveRequest,
    TransferPeer,
    TransferStats,
)

# of 1000 prefill tokens per second: 256 tokens in 16 strides, then 256 in each
HASHES = make_hashes(16 + 15)
NUM_TOKENS = 4096
BUSY = {"waiting_prefill_tokens": 100_000}


def make_links(**fields: object) -> Links:
    """Three replicas that exchange blocks: 1 ms to compute a token, 0.1 ms to copy one."""
    values: dict[str, object] = {
        "groups": np.array([5, 5, 5]),
        "token_s": np.full(3, 1e-3),
        "fetch_token_s": np.full(3, 1e-4),
        "overhead_s": np.full(3, 0.01),
        "busy_until": np.zeros(3),
    }
    return Links(**(values | fields))  # pyright: ignore


def price(links: Links, hits: list[float], tokens: float = 1000.0, now: float = 0.0) -> Fetches:
    """One request of which replica 0 holds `tokens`."""
    return price_fetches(
        TransferConfig(),
        links,
        np.array([[0]]),
        np.array([[tokens]]),
        np.array([hits]),
        slice(0, 3),
        now,
    )


def test_what_the_source_has_more_is_copied() -> None:
    fetches = price(make_links(), [1000.0, 200.0, 0.0])
    assert fetches.tokens.tolist() == [[0.0, 800.0, 1000.0]]
    assert fetches.seconds[0] == pytest.approx([0.0, 0.09, 0.11])


def test_little_is_computed() -> None:
    assert price(make_links(), [20.0, 0.0, 0.0], tokens=20.0).tokens.tolist() == [[0.0] * 3]


def test_slow_links_are_left_alone() -> None:
    links = make_links(fetch_token_s=np.array([1e-4, 1e-4, 9e-4]))
    assert price(links, [1000.0, 0.0, 0.0]).tokens.tolist() == [[0.0, 1000.0, 0.0]]


def test_busy_links_cost_a_wait() -> None:
    links = make_links(busy_until=np.array([10.1, 0.0, 10.9]))
    fetches = price(links, [1000.0, 0.0, 0.0], now=10.0)
    assert fetches.tokens.tolist() == [[0.0, 1000.0, 0.0]]
    assert fetches.seconds[0, 1] == pytest.approx(0.1 + 0.11)


def test_only_replicas_of_like_blocks_exchange_them() -> None:
    links = make_links(groups=np.array([5, 6, 0]))
    assert price(links, [1000.0, 0.0, 0.0]).tokens.tolist() == [[0.0] * 3]
    assert price(make_links(groups=np.zeros(3, dtype=int)), [1000.0, 0.0, 0.0]).tokens.sum() == 0.0


def test_ranks_and_block_bytes_make_a_group() -> None:
    one, two = exchanging("a"), exchanging("b")
    assert exchange_group(one) == exchange_group(two) > 0
    assert exchange_group(replace(one, actors=("x", "y"))) != exchange_group(one)
    assert exchange_group(replace(one, block_bytes=2048)) != exchange_group(one)
    assert exchange_group(replace(one, actors=())) == 0


def test_prices_follow_what_was_measured() -> None:
    info = exchanging("a")  # 64 bytes a token
    token_s, overhead_s = fetch_prices(info, TransferStats(), 0.0)
    assert token_s == pytest.approx(64e-9) and overhead_s == pytest.approx(0.01)
    measured = TransferStats(done=8, bytes_per_s=64e3, overhead_s=0.5)
    assert fetch_prices(info, measured, 1e-3) == pytest.approx((2e-3, 0.5))
    failing = replace(measured, done=0, failed=8)
    assert fetch_prices(info, failing, 1e-3) == pytest.approx((10e-3, 2.5))


# ── the controller ────────────────────────────────────────────────────────────────────────────


def exchanging(name: str, **fields: object):
    values: dict[str, object] = {"actors": (f"{name}/0",), "block_bytes": 1024, "num_blocks": 1000}
    values |= {"max_context": 8192, **fields}
    return make_info(name, **values)


def make_pair(
    config: TransferConfig | None = None, **fields: object
) -> tuple[Controller, FakeReplica, FakeReplica]:
    """Two replicas; the first holds HASHES and is busy."""
    controller = make_controller(start_slack_s=0.05)
    if config is not None:
        late = LateBindingConfig(start_slack_s=0.05, transfer=config)
        controller.config = replace(controller.config, late_binding=late)
    a, b = (join(controller, exchanging(name, **fields)) for name in ("a", "b"))
    a.store(*HASHES)
    tell(controller, a, 1.0, **BUSY)
    tell(controller, b, 1.0)
    return controller, a, b


def ask(**fields: object) -> ReserveRequest:
    values = {"route_hashes": HASHES, "num_tokens": NUM_TOKENS + 10, **fields}
    return make_request(**{"admission_class": AdmissionClass.STANDARD, **values})


def reserve(controller: Controller, now: float = 1.0, **fields: object) -> Lease:
    lease = controller.reserve(ask(**fields), now)
    controller.check_integrity()
    assert isinstance(lease, Lease), lease
    return lease


def test_the_lease_names_the_source() -> None:
    controller, *_ = make_pair()
    lease = reserve(controller)
    assert lease.replica_id == "b" and lease.transfer is not None
    assert lease.transfer.source == TransferPeer("a", "a", ("a/0",))
    assert lease.transfer.num_tokens == NUM_TOKENS == lease.expected_hit_tokens
    assert lease.transfer.timeout_s == pytest.approx(4.096)
    offered = {r.replica_id: r.transfers_offered for r in controller.cluster_state(1.0).replicas}
    assert offered == {"a": 0, "b": 1}


def test_no_transfer_to_where_the_prefix_is() -> None:
    controller, a, b = make_pair()
    tell(controller, a, 2.0)
    tell(controller, b, 2.0, **BUSY)
    lease = reserve(controller, now=2.0)
    assert lease.replica_id == "a" and lease.transfer is None


def test_it_can_be_turned_off() -> None:
    controller, *_ = make_pair(TransferConfig(enabled=False))
    lease = reserve(controller)
    assert lease.replica_id == "b" and lease.transfer is None and not lease.expected_hit_tokens


@pytest.mark.parametrize("fields", [{"actors": ()}, {"block_bytes": 0}])
def test_replicas_that_cannot_exchange_are_offered_nothing(fields: dict[str, object]) -> None:
    controller, *_ = make_pair(None, **fields)
    assert reserve(controller).transfer is None


def test_what_is_only_expected_is_no_source() -> None:
    controller = make_controller(start_slack_s=0.05)
    replicas = {name: join(controller, exchanging(name)) for name in ("a", "b")}
    lease = reserve(controller)  # it will compute the prompt, and has not yet
    transfers = controller.pools()["m"].transfers
    assert transfers.source_of(ask()) == NOWHERE
    computing = replicas[lease.replica_id]
    computing.store(*HASHES)
    tell(controller, computing, 1.1)
    assert transfers.source_of(ask()).num_tokens == NUM_TOKENS


@pytest.mark.parametrize("problem", ["excluded", "suspect", "dead"])
def test_a_source_in_trouble_is_none(problem: str) -> None:
    controller, a, _ = make_pair()
    if problem == "suspect":
        controller.replica_failed("a", a.info.incarnation, 1.0)
    if problem == "dead":
        controller.declare_dead("a", 1.0)
    excluded = ("a",) if problem == "excluded" else ()
    lease = reserve(controller, excluded=excluded)
    assert lease.replica_id == "b" and lease.transfer is None


def test_a_replica_that_drains_is_a_source_and_learns_its_peers() -> None:
    controller, a, _ = make_pair()
    controller.drain("a", 1.5)
    reply = tell(controller, a, 1.6)
    assert reply.draining and reply.peers == (TransferPeer("b", "a", ("b/0",)),)
    assert reserve(controller, now=1.6).transfer is not None


def test_a_slow_source_is_not_used() -> None:
    controller, _, b = make_pair()
    slow = TransferStats(done=9, bytes_per_s=64e3, overhead_s=0.01)
    tell(controller, b, 1.1, transfers=slow)
    assert reserve(controller, now=1.1).transfer is None


def test_transfers_wait_for_each_other_in_the_price() -> None:
    controller, _, b = make_pair()
    # half a second for this prefix, of the four that computing takes
    quick = TransferStats(done=9, bytes_per_s=0.5e6, overhead_s=0.01)
    offers = []
    for _ in range(8):
        tell(controller, b, 1.1, transfers=quick)
        lease = reserve(controller, now=1.1)
        offers.append(lease.transfer is not None)
        controller.release(lease.request_key, lease.attempt, 1.1)
        tell(controller, b, 1.1, transfers=quick)
    assert offers == sorted(offers, reverse=True) and 2 <= sum(offers) <= 5


def test_explain_shows_the_transfer_as_a_term() -> None:
    controller, *_ = make_pair()
    explained = controller.explain(ask(), 1.0)
    assert isinstance(explained, Explanation) and explained.replica_id == "b"
    by_id = {replica.replica_id: replica for replica in explained.replicas}
    here, there = by_id["b"], by_id["a"]
    assert (here.transfer_from, here.transfer_tokens) == ("a", NUM_TOKENS)
    assert here.transfer_ms == pytest.approx(10.0 + NUM_TOKENS * 64e-6)
    assert here.prefill_ms == pytest.approx(10.0) and here.affinity_ms == 0.0
    assert (there.transfer_from, there.transfer_tokens, there.transfer_ms) == ("", 0, 0.0)
    terms = (here.prefill_ms, here.load_ms, here.queue_ms, here.blocks_ms, here.batch_ms)
    assert here.total_ms == pytest.approx(sum(terms) + here.affinity_ms + here.transfer_ms)


def test_baselines_know_no_transfers() -> None:
    controller = make_controller("least-requests")
    a, _ = (join(controller, exchanging(name)) for name in ("a", "b"))
    a.store(*HASHES)
    tell(controller, a, 1.0, **BUSY)
    assert reserve(controller).transfer is None


def test_status_explanation_and_metrics_tell_of_transfers() -> None:
    controller, _, b = make_pair()
    stats = TransferStats(done=3, failed=1, blocks=70, num_bytes=1 << 20, seconds=0.5)
    tell(controller, b, 1.1, transfers=stats)
    explained = controller.explain(ask(), 1.1)
    assert isinstance(explained, Explanation)
    reserve(controller, now=1.1)
    costs = replica_explanation_to_proto(explained.replicas[1])
    assert (costs.transfer_from, costs.transfer_tokens) == ("a", NUM_TOKENS)
    assert costs.transfer_ms > 0.0
    state = controller.cluster_state(1.1)
    status = cluster_state_to_proto(state).replicas[1]
    assert (status.transfers_offered, status.transfers_done, status.transfers_failed) == (1, 3, 1)
    assert (status.transferred_bytes, status.transfer_s) == (1 << 20, 0.5)
    text = GatewayMetrics().render(state).decode()
    place = 'model_name="m",outcome="done",replica="b"'
    assert f"pagefleet_prefix_transfers_total{{{place}}} 3.0" in text
    assert 'pagefleet_prefix_transfer_blocks_total{model_name="m",replica="b"} 70.0' in text
