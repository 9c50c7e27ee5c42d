"""The peers' policies decide as their formulas say."""

import numpy as np
import pytest
from cluster_factories import make_hashes

from pagefleet.cluster.binding_costs import LateBindingConfig
from pagefleet.cluster.policies import POLICY_NAMES, make_policy
from pagefleet.cluster.replica_view import ReplicaColumns
from pagefleet.cluster.routing_policy import RoutedRequest, RoutingPolicy, cheapest


def make_columns(count: int = 4, **values: list[float]) -> ReplicaColumns:
    columns = ReplicaColumns()
    for slot in range(count):
        columns.add_slot()
        columns.open[slot] = True
        columns.token_s[slot] = 1e-3
        columns.total[slot] = columns.available[slot] = 100
        columns.max_active[slot] = 64
    for name, column in values.items():
        getattr(columns, name)[:count] = column
    return columns


def make_routed(
    key: str = "q", hits: list[float] | None = None, chain: int = 0, tokens: int = 5120
) -> RoutedRequest:
    hits = hits or [0.0] * 4
    return RoutedRequest(
        key,
        make_hashes(tokens // 512, chain),
        tokens,
        tokens // 512,
        512,
        100.0,
        np.ones(len(hits), dtype=np.bool_),
        np.array(hits),
    )


def policy_named(name: str) -> RoutingPolicy:
    return make_policy(name, LateBindingConfig())


def choice(policy: RoutingPolicy, request: RoutedRequest, columns: ReplicaColumns) -> int:
    slot = cheapest(request, policy.cost_ms(request, columns, 0.0))
    assert slot is not None
    policy.placed(request, slot)
    return slot


def test_the_names_are_those_that_the_command_line_takes() -> None:
    assert POLICY_NAMES == (
        "default",
        "round-robin",
        "least-requests",
        "power-of-two",
        "consistent-hash",
        "ray-prefix",
        "sglang",
        "dynamo",
        "llmd",
        "lmetric",
        "min-ttft",
    )
    with pytest.raises(ValueError, match="nobody"):
        policy_named("nobody")


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_respects_the_candidates(name: str) -> None:
    policy, columns = policy_named(name), make_columns()
    request = make_routed(hits=[4096.0, 0.0, 0.0, 0.0])
    request.candidates[:] = [False, False, True, False]
    assert choice(policy, request, columns) == 2
    request.candidates[:] = False
    assert cheapest(request, policy.cost_ms(request, columns, 0.0)) is None


def test_ties_are_spread_by_request() -> None:
    columns = make_columns()
    chosen = [choice(policy_named("min-ttft"), make_routed(f"q{n}"), columns) for n in range(400)]
    counts = np.bincount(chosen, minlength=4)
    assert counts.min() > 60
    again = [choice(policy_named("min-ttft"), make_routed(f"q{n}"), columns) for n in range(400)]
    assert chosen == again


def test_round_robin_takes_turns() -> None:
    policy, columns = policy_named("round-robin"), make_columns()
    assert [choice(policy, make_routed(), columns) for _ in range(6)] == [0, 1, 2, 3, 0, 1]


def test_least_requests_and_power_of_two_look_at_requests() -> None:
    columns = make_columns(active=[5, 1, 9, 7])
    assert choice(policy_named("least-requests"), make_routed(), columns) == 1
    chosen = [
        choice(policy_named("power-of-two"), make_routed(f"q{n}"), columns) for n in range(50)
    ]
    assert 2 not in chosen  # the worst of any pair
    assert {0, 1} <= set(chosen)


def test_consistent_hash_keeps_a_prefix_in_place_within_bounded_load() -> None:
    policy, columns = policy_named("consistent-hash"), make_columns(active=[1, 1, 1, 1])
    home = choice(policy, make_routed("a"), columns)
    assert choice(policy, make_routed("b"), columns) == home
    columns.active[home] = 50
    assert choice(policy, make_routed("c"), columns) != home


def test_ray_prefix_follows_what_was_routed_and_spreads_the_rest() -> None:
    policy, columns = policy_named("ray-prefix"), make_columns()
    home = choice(policy, make_routed("a", chain=1), columns)
    columns.active[home] = 99  # its threshold is infinite
    assert choice(policy, make_routed("b", chain=1), columns) == home
    others = {choice(policy, make_routed(f"c{n}", chain=2 + n), columns) for n in range(3)}
    assert home not in others and len(others) == 3  # the smallest trees


def test_sglang_switches_to_the_shortest_queue_when_unbalanced() -> None:
    policy, columns = policy_named("sglang"), make_columns()
    home = choice(policy, make_routed("a"), columns)
    columns.active[home] = 60
    assert choice(policy, make_routed("b"), columns) == home
    columns.active[home] = 70
    assert choice(policy, make_routed("c"), columns) != home
    policy.forget(home)
    columns.active[:4] = [3, 3, 0, 3]
    assert choice(policy, make_routed("d", chain=5), columns) == 2


def test_sglang_sends_one_prefix_to_one_of_its_holders() -> None:
    policy, columns = policy_named("sglang"), make_columns()
    for slot in range(4):
        policy.placed(make_routed(), slot)
    assert len({choice(policy, make_routed(f"q{n}"), columns) for n in range(8)}) == 1
    for slot in range(4):
        for chain in range(1, 9):
            policy.placed(make_routed(chain=chain), slot)
    homes = {choice(policy, make_routed(f"r{n}", chain=n), columns) for n in range(1, 9)}
    assert len(homes) > 1


def test_ray_prefix_counts_text_beyond_the_last_hash() -> None:
    policy, columns = policy_named("ray-prefix"), make_columns(2)
    policy.placed(make_routed("a", [0.0] * 2, chain=1, tokens=5120), 0)
    policy.placed(make_routed("b", [0.0] * 2, chain=2, tokens=5120 + 100), 1)
    assert choice(policy, make_routed("c", [0.0] * 2, chain=3), columns) == 0


def test_dynamo_adds_prefill_blocks_and_blocks_in_use() -> None:
    columns = make_columns(pinned=[0, 9, 0, 0], prefill_tokens=[0, 0, 512 * 12, 512])
    request = make_routed(hits=[0.0, 4096.0, 4096.0, 0.0])
    costs = policy_named("dynamo").cost_ms(request, columns, 0.0)
    assert costs.tolist() == [10.0, 2.0 + 9.0, 14.0, 11.0]


def test_llmd_sums_its_three_scores() -> None:
    columns = make_columns(pinned=[50, 0, 0, 0], waiting=[0, 4, 2, 0])
    request = make_routed(hits=[5120.0, 0.0, 2560.0, 0.0])
    costs = policy_named("llmd").cost_ms(request, columns, 0.0)
    assert (-costs).tolist() == pytest.approx([2 + 0.5 + 1, 0 + 1 + 0, 1 + 1 + 0.5, 0 + 1 + 1])


def test_lmetric_multiplies_work_and_requests() -> None:
    columns = make_columns(active=[1, 0, 3, 0], prefill_tokens=[0, 1000, 0, 0])
    request = make_routed(hits=[5120.0, 0.0, 4096.0, 0.0])
    costs = policy_named("lmetric").cost_ms(request, columns, 0.0)
    assert costs.tolist() == [1 * 2, 6120 * 1, 1024 * 4, 5120 * 1]


def test_min_ttft_counts_milliseconds() -> None:
    columns = make_columns(prefill_tokens=[500, 0, 0, 0], token_s=[1e-3, 2e-3, 1e-3, 1e-3])
    request = make_routed(hits=[4096.0, 4096.0, 0.0, 0.0])
    costs = policy_named("min-ttft").cost_ms(request, columns, 0.0)
    assert costs.tolist() == pytest.approx([1524.0, 2048.0, 5120.0, 5120.0])
