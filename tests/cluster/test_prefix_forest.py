"""What recent prompts have in common."""

import random

from cluster_factories import make_request

from pagefleet.cluster.prefix_forest import Run, grow_forest


def ask(chain: str, tenant: str = "a", model: str = "m"):
    """One letter a hash; as in a real chain, each stands for all before it."""
    hashes = tuple(chain[: end + 1].encode() for end in range(len(chain)))
    return make_request(route_hashes=hashes, tenant=tenant, model=model)


def outline(runs: list[Run]) -> set[tuple[str, int, str | None]]:
    """(prefix, requests, its parent's prefix) of each run."""
    return {
        (
            run.last_hash.decode(),
            run.num_requests,
            None if run.parent is None else run.parent.last_hash.decode(),
        )
        for run in runs
    }


def test_joins_what_has_no_branch() -> None:
    assert outline(grow_forest([ask("abcd")])) == {("abcd", 1, None)}


def test_branches_where_prompts_part_or_end() -> None:
    runs = grow_forest([ask("abcd"), ask("abe"), ask("ab"), ask("x"), ask("")])
    assert outline(runs) == {
        ("ab", 3, None),
        ("abcd", 1, "ab"),
        ("abe", 1, "ab"),
        ("x", 1, None),
    }
    assert [run.depth for run in runs if run.last_hash == b"abcd"] == [4]


def test_tenants_and_models_have_trees_of_their_own() -> None:
    runs = grow_forest([ask("ab"), ask("ab", tenant="b"), ask("ab", model="n")])
    assert {(run.model, run.tenant, run.num_requests) for run in runs} == {
        ("m", "a", 1),
        ("m", "b", 1),
        ("n", "a", 1),
    }


def test_keeps_the_runs_of_most_requests_and_never_a_child_alone() -> None:
    rng = random.Random(0)
    requests = [ask("".join(rng.choices("abc", k=rng.randint(1, 8)))) for _ in range(200)]
    runs = grow_forest(requests, max_nodes=12)
    assert len(runs) == 12
    for place, run in enumerate(runs):
        assert run.parent is None or run.parent in runs[:place]
    everything = grow_forest(requests, max_nodes=10_000)
    smallest = min(run.num_requests for run in runs)
    left_out = [run for run in everything if run.last_hash not in {r.last_hash for r in runs}]
    assert all(run.num_requests <= smallest for run in left_out)


def test_counts_every_request_that_passes() -> None:
    rng = random.Random(1)
    chains = ["".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(100)]
    for run in grow_forest(map(ask, chains), max_nodes=10_000):
        prefix = run.last_hash.decode()
        assert run.num_requests == sum(chain.startswith(prefix) for chain in chains)


def test_a_prompt_of_many_hashes_is_no_deep_recursion() -> None:
    hashes = tuple(f"{end:08d}".encode() for end in range(5000))
    requests = [make_request(route_hashes=hashes[:end]) for end in range(1, 5001, 10)]
    assert sum(run.parent is None for run in grow_forest(requests)) == 1
