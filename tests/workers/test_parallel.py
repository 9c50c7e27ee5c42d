"""Ranks that are real processes: sums, messages, and what happens when one of them fails."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import rank_programs as programs
import torch
from rank_processes import Died, RankProcesses

from pagefleet.kernels import all_reduce
from pagefleet.workers import shared_memory_group
from pagefleet.workers.parallel import GroupAborted, RankLost, SingleRank
from pagefleet.workers.rank_spec import RankSpec, Transport
from pagefleet.workers.rendezvous import best_transport, connect
from pagefleet.workers.shared_memory_group import SharedMemoryGroup, segment_path

needs_library = pytest.mark.skipif(
    not shared_memory_group.is_available(), reason="the compiled collectives are missing"
)
FAILURES = ("RankLost", "GroupAborted")
SIZES = (1, 2, 3, 31, 33, 1000, 2049, 16384)


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    started = RankProcesses()
    yield started
    started.close()


@pytest.fixture
def name() -> Iterator[str]:
    """A group's name, and the promise that its segment leaves nothing behind."""
    chosen = uuid4().hex
    yield chosen
    assert not segment_path(chosen).exists()


@pytest.fixture(params=[pytest.param("shared", marks=needs_library), "gloo"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "port") if request.param == "gloo" else "shared"


def sequential_sum(world_size: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    total = programs.example(0, size, dtype).float()
    for rank in range(1, world_size):
        total += programs.example(rank, size, dtype).float()
    return total.to(dtype)


def test_native_library_loads_where_it_must() -> None:
    if os.environ.get("PAGEFLEET_REQUIRE_NATIVE") == "1":
        assert all_reduce.library() is not None


@needs_library
@pytest.mark.parametrize(
    ("world_size", "sizes", "slot_bytes"),
    [
        pytest.param(2, SIZES, 4096, id="chunks"),
        pytest.param(3, SIZES, 64 * 1024, id="one-chunk"),
        pytest.param(4, (0, 5, 65536, 200_001), 256 * 1024, id="shared-sums"),
    ],
)
def test_sums_are_the_rank_ordered_ones_bit_by_bit(
    processes: RankProcesses, name: str, world_size: int, sizes: tuple[int, ...], slot_bytes: int
) -> None:
    results = processes.run(programs.reduce_all, world_size, "shared", name, sizes, slot_bytes)
    wanted = [
        sequential_sum(world_size, size, dtype) for size in sizes for dtype in programs.DTYPES
    ]
    for sums in results:
        assert isinstance(sums, list), sums
        for found, right in zip(sums, wanted, strict=True):
            assert torch.equal(found, right), (found.dtype, found.shape)


@needs_library
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_random_sequences_give_what_they_should(
    processes: RankProcesses, name: str, world_size: int
) -> None:
    """Ranks that run ahead, or fall behind, must not see a slot that is written over."""
    seed = int(os.environ.get("FUZZ_SEED", "5")) + world_size
    num_steps = int(os.environ.get("FUZZ_STEPS", "400"))
    # Slots that are small, and ones large enough for sums to be shared between the ranks.
    slot_bytes = 256 * 1024 if world_size == 4 else 2048
    program = (programs.mix_collectives, world_size, name, seed, num_steps, slot_bytes)
    assert processes.run(*program, timeout_s=600.0) == [num_steps] * world_size


def test_gloo_sums_agree_on_all_ranks(processes: RankProcesses, name: str, tmp_path: Path) -> None:
    results = processes.run(programs.reduce_all, 2, str(tmp_path / "port"), name, SIZES, 0)
    wanted = [sequential_sum(2, size, dtype) for size in SIZES for dtype in programs.DTYPES]
    for sums in results:
        assert isinstance(sums, list), sums
        for found, right in zip(sums, wanted, strict=True):
            assert torch.equal(found, right), (found.dtype, found.shape)


def test_parts_are_gathered_in_rank_order(processes: RankProcesses, kind: str, name: str) -> None:
    results = processes.run(programs.gather_all, 3, kind, name)
    wanted: list[torch.Tensor] = []
    for dim in range(3):
        shapes = [[5, 4, 11] for _ in range(3)]
        for rank, shape in enumerate(shapes):
            shape[dim] = 3 + 2 * rank
        parts = [torch.full(shape, rank) for rank, shape in enumerate(shapes)]
        wanted += [torch.cat(parts, dim), torch.cat(parts, dim).float()]
    for step in range(20):
        wanted.append(torch.tensor([100 * step + rank for rank in range(3)]).repeat_interleave(300))
    wanted.append(torch.tensor([[0, 1, 2]]))
    for rank, found in enumerate(results):
        assert isinstance(found, list), found
        for index, (tensor, right) in enumerate(zip(found, wanted, strict=True)):
            only_leader = (index < 6 and index % 2 == 1) or 6 <= index < 26
            if only_leader and rank > 0:
                assert tensor is None
            else:
                assert torch.equal(tensor.reshape(right.shape), right), index


def test_messages_arrive_whole_and_in_order(processes: RankProcesses, kind: str, name: str) -> None:
    sizes = [0, 1, 100, 4080, 4088, 4089, 10_000, 300_000, *([7] * 50)]
    results = processes.run(programs.broadcast_all, 3, kind, name, sizes)
    assert results == [sizes] * 3


def test_a_killed_rank_is_an_error_on_the_others(
    processes: RankProcesses, kind: str, name: str
) -> None:
    results = processes.run(programs.reduce_until_killed, 3, kind, name, 1, 20)
    assert results[1] == Died(-signal.SIGKILL)
    for rank in (0, 2):
        error_name, elapsed_s = results[rank]
        assert error_name in FAILURES and elapsed_s < 5.0


@needs_library
def test_a_killed_leader_is_an_error_on_the_others(processes: RankProcesses, name: str) -> None:
    results = processes.run(programs.reduce_until_killed, 2, "shared", name, 0, 0)
    assert results[0] == Died(-signal.SIGKILL)
    error_name, elapsed_s = results[1]
    assert error_name in FAILURES and elapsed_s < 2.0


def test_ranks_that_enter_different_numbers_of_times_never_hang(
    processes: RankProcesses, kind: str, name: str
) -> None:
    world_size, timeout_s = 3, 1.0
    chooser = random.Random(int(os.environ.get("FUZZ_SEED", "48")))
    counts = [chooser.randint(0, 60) for _ in range(world_size)]
    counts[0] = max(counts) + 1
    results = processes.run(programs.reduce_some_times, world_size, kind, name, counts, timeout_s)
    for count, (done, error_name, elapsed_s) in zip(counts, results, strict=True):
        # gloo lets a rank go on that the others have already heard from
        assert min(counts) <= done <= count
        assert (error_name == "") == (done == count)
        assert elapsed_s < timeout_s + 3.0


@needs_library
@pytest.mark.parametrize("what", ["size", "dtype", "operation", "close", "abort"])
def test_a_rank_that_comes_with_something_else_is_an_error(
    processes: RankProcesses, name: str, what: str
) -> None:
    results = processes.run(programs.enter_different, 3, "shared", name, what)
    if what in ("close", "abort"):
        assert results[1] in ("closed", "GroupAborted")
        assert results[0] in FAILURES and results[2] in FAILURES
    else:
        assert "RankMismatch" in results
        assert set(results) <= {"RankMismatch", *FAILURES}


@needs_library
def test_a_frozen_rank_is_a_timeout(processes: RankProcesses, name: str) -> None:
    processes.start(programs.stop_in_the_middle, 2, name)
    assert processes.result(0) == "RankTimeout"
    os.kill(processes.pid(1), signal.SIGCONT)
    assert processes.result(1) == "GroupAborted"


def test_who_waits_for_a_step_hears_of_the_leaders_death(
    processes: RankProcesses, kind: str, name: str
) -> None:
    results = processes.run(programs.wait_for_a_dying_leader, 2, kind, name)
    assert results[0] == Died(-signal.SIGKILL)
    error_name, elapsed_s = results[1]
    assert error_name in FAILURES and elapsed_s < 3.0


@needs_library
def test_a_segment_has_no_name_once_all_have_it(processes: RankProcesses, name: str) -> None:
    # Rank 1 may look before rank 0 has taken the name away; rank 0 may not find it.
    assert processes.run(programs.meet_and_part, 2, name)[0] is False
    assert not segment_path(name).exists()


@needs_library
def test_what_a_killed_leader_left_is_removed_by_the_next(
    processes: RankProcesses, name: str
) -> None:
    left = uuid4().hex
    assert processes.run(programs.die_before_the_others_come, 1, left) == [Died(-signal.SIGKILL)]
    assert segment_path(left).exists()
    processes.run(programs.meet_and_part, 2, name)
    assert not segment_path(left).exists()


@needs_library
def test_a_rank_without_a_leader_gives_up(name: str) -> None:
    with pytest.raises(Exception, match="did not make"):
        SharedMemoryGroup(name, 1, 2, start_timeout_s=0.05)


@needs_library
def test_a_leader_without_ranks_gives_up_and_leaves_nothing(name: str) -> None:
    with pytest.raises(Exception, match="did not take part"):
        SharedMemoryGroup(name, 0, 2, start_timeout_s=0.05)


@needs_library
def test_a_closed_group_refuses(name: str) -> None:
    group = SharedMemoryGroup(name, 0, 1)
    group.close()
    group.abort()
    with pytest.raises(GroupAborted):
        group.barrier()


def test_errors_survive_the_way_between_processes() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(RankLost(3, "rank 3 is gone")))
    assert isinstance(error, RankLost)
    assert error.rank == 3 and str(error) == "rank 3 is gone"


def test_one_rank_is_the_identity() -> None:
    groups = connect(RankSpec(), torch.device("cpu"))
    assert isinstance(groups.tensors, SingleRank)
    tensor = torch.ones(3)
    groups.tensors.all_reduce(tensor)
    assert torch.equal(tensor, torch.ones(3))
    assert groups.tensors.gather(tensor, 0) is tensor
    assert groups.messages.broadcast(b"step") == b"step"
    assert groups.minimum((4, 5)) == (4, 5)


def test_ranks_on_several_hosts_use_torch() -> None:
    assert best_transport(is_one_host=False) is Transport.TORCH
