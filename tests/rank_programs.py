"""What the ranks of tests/workers/test_parallel.py do. Module-level, so that they can be sent to
other processes."""

import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import TCPStore

from pagefleet.workers import shared_memory_group
from pagefleet.workers.parallel import GroupError, TensorParallelGroup
from pagefleet.workers.shared_memory_group import SharedMemoryGroup
from pagefleet.workers.torch_group import TorchDistributedGroup, host_store, open_store

DTYPES = (torch.float32, torch.bfloat16)


def make_group(
    kind: str, name: str, rank: int, world_size: int, timeout_s: float = 20.0, **options: int
) -> TensorParallelGroup:
    """kind: "shared" or a port file's path: gloo, its leader writes its port there."""
    if kind == "shared":
        return SharedMemoryGroup(name, rank, world_size, timeout_s=timeout_s, **options)
    store = meet_at(kind, rank, 60.0)
    return TorchDistributedGroup(
        store, name, rank, world_size, device=torch.device("cpu"), timeout_s=timeout_s
    )


def meet_at(port_file: str, rank: int, timeout_s: float) -> TCPStore:
    """The leader hosts a store and writes its port; the others wait for it."""
    if rank == 0:
        store = host_store("127.0.0.1", timeout_s)
        Path(f"{port_file}.new").write_text(str(store.port))
        os.rename(f"{port_file}.new", port_file)
        return store
    deadline = time.monotonic() + timeout_s
    while not os.path.exists(port_file):
        assert time.monotonic() < deadline, "the leader wrote no port"
        time.sleep(0.01)
    return open_store("127.0.0.1", int(Path(port_file).read_text()), timeout_s)


def example(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """A rank's part: of very different magnitudes, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(1000 * size + rank)
    values = torch.randn(size, generator=generator)
    return (values * 10.0 ** torch.randint(-4, 5, (size,), generator=generator)).to(dtype)


def reduce_all(
    rank: int, world_size: int, kind: str, name: str, sizes: Sequence[int], slot_bytes: int
) -> list[Tensor]:
    """Sums of `example` for each size and dtype."""
    options = {"slot_bytes": slot_bytes} if kind == "shared" else {}
    group = make_group(kind, name, rank, world_size, **options)
    sums: list[Tensor] = []
    for size in sizes:
        for dtype in DTYPES:
            tensor = example(rank, size, dtype)
            group.all_reduce(tensor)
            sums.append(tensor)
    group.barrier()
    group.close()
    return sums


def gather_all(rank: int, world_size: int, kind: str, name: str) -> list[Tensor | None]:
    """Equal and unequal parts, along the first, a middle and the last dimension."""
    options = {"slot_bytes": 1024} if kind == "shared" else {}
    group = make_group(kind, name, rank, world_size, **options)
    sizes = [3 + 2 * other for other in range(world_size)]
    found: list[Tensor | None] = []
    for dim in range(3):
        shape = [5, 4, 11]
        shape[dim] = sizes[rank]
        part = torch.full(shape, rank, dtype=torch.int64)
        found.append(group.all_gather(part, dim, sizes))
        found.append(group.gather(part.float(), dim, sizes))
    for step in range(20):  # a leader that reads late must not find what came after
        found.append(group.gather(torch.full((1, 300), 100 * step + rank), 1))
    found.append(group.all_gather(torch.tensor([[rank]]), -1))
    group.barrier()
    group.close()
    return found


def broadcast_all(
    rank: int, world_size: int, kind: str, name: str, sizes: Sequence[int]
) -> list[int]:
    """The leader sends one message after the other and waits for nobody."""
    options = {"slot_bytes": 4096} if kind == "shared" else {}
    group = make_group(kind, name, rank, world_size, **options)
    found: list[int] = []
    for index, size in enumerate(sizes):
        message = bytes([index % 251]) * size
        received = group.broadcast(message if rank == 0 else None)
        found.append(len(received) if received == message else -1)
    group.barrier()
    group.close()
    return found


def reduce_some_times(
    rank: int, world_size: int, kind: str, name: str, counts: Sequence[int], timeout_s: float
) -> tuple[int, str, float]:
    """Enter counts[rank] times and then stay, alive, for as long as the others may wait.

    → how often it worked, the error's class ("" = none), the seconds the last call took.
    """
    group = make_group(kind, name, rank, world_size, timeout_s)
    tensor = torch.ones(100)
    begin = time.monotonic()
    done, error_name = 0, ""
    try:
        for _ in range(counts[rank]):
            begin = time.monotonic()
            group.all_reduce(tensor)
            done += 1
    except GroupError as error:
        error_name = type(error).__name__
    elapsed_s = time.monotonic() - begin
    if not error_name:
        deadline = time.monotonic() + 2 * timeout_s
        while time.monotonic() < deadline:
            time.sleep(0.05)
    group.close()
    return done, error_name, elapsed_s


def reduce_until_killed(
    rank: int, world_size: int, kind: str, name: str, victim: int, after: int
) -> tuple[str, float]:
    """The victim kills itself; the others → the error they got, and how long the call took."""
    group = make_group(kind, name, rank, world_size, 20.0)
    tensor = torch.ones(5000)
    for index in range(1000):
        if rank == victim and index == after:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        try:
            group.all_reduce(tensor)
        except GroupError as error:
            elapsed_s = time.monotonic() - begin
            group.close()
            return type(error).__name__, elapsed_s
    raise AssertionError("nobody died")


def enter_different(rank: int, world_size: int, kind: str, name: str, what: str) -> str:
    """Rank 1 comes with something else than the others."""
    group = make_group(kind, name, rank, world_size, 2.0)
    try:
        if rank != 1:
            group.all_reduce(torch.ones(64))
        elif what == "size":
            group.all_reduce(torch.ones(65))
        elif what == "dtype":
            group.all_reduce(torch.ones(64, dtype=torch.bfloat16))
        elif what == "operation":
            group.barrier()
        elif what == "close":
            group.close()
            return "closed"
        elif what == "abort":
            group.abort()
        group.barrier()
    except GroupError as error:
        return type(error).__name__
    finally:
        group.close()
    return ""


def stop_in_the_middle(rank: int, world_size: int, name: str) -> str:
    """Rank 1 is frozen, which no lock and no process table tells."""
    group = SharedMemoryGroup(name, rank, world_size, timeout_s=1.0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        group.barrier()
    except GroupError as error:
        return type(error).__name__
    finally:
        group.close()
    return ""


def wait_for_a_dying_leader(rank: int, world_size: int, kind: str, name: str) -> tuple[str, float]:
    """The leader sends one message, and dies; the others wait for another."""
    group = make_group(kind, name, rank, world_size, 5.0)
    group.broadcast(b"hello" if rank == 0 else None)
    group.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        group.broadcast(None)
    except GroupError as error:
        return type(error).__name__, time.monotonic() - begin
    finally:
        group.close()
    return "", 0.0


def die_before_the_others_come(rank: int, world_size: int, name: str) -> None:
    """Leave a named segment behind, as a leader that is killed while it waits."""
    library = shared_memory_group.all_reduce.library()
    assert library is not None
    shared_memory_group._join(library, name, 0, 2, 5.0, 5.0, 4096)
    os.kill(os.getpid(), signal.SIGKILL)


def meet_and_part(rank: int, world_size: int, name: str) -> bool:
    """A group that is closed twice; → whether its file still has a name."""
    group = SharedMemoryGroup(name, rank, world_size)
    has_name = shared_memory_group.segment_path(name).exists()
    group.check()
    group.barrier()
    group.close()
    group.close()
    return has_name


def mix_collectives(
    rank: int, world_size: int, name: str, seed: int, num_steps: int, slot_bytes: int
) -> int:
    """The same random sequence on all ranks, each result checked; some ranks dawdle at random."""
    group = SharedMemoryGroup(name, rank, world_size, slot_bytes=slot_bytes)
    shared = random.Random(seed)
    own = random.Random(seed * 100 + rank)
    for step in range(num_steps):
        operation = shared.choice(("reduce", "gather", "all_gather", "broadcast", "barrier"))
        size = shared.choice((1, 7, 64, shared.randint(1, 4 * slot_bytes // 4)))
        if own.random() < 0.02:
            time.sleep(own.random() * 0.002)
        mine = torch.arange(size, dtype=torch.float32) + step + 1000 * rank
        if operation == "reduce":
            total = world_size * (torch.arange(size) + step) + 500 * world_size * (world_size - 1)
            group.all_reduce(mine)
            assert torch.equal(mine, total.float()), f"step {step}: a wrong sum"
        elif operation == "broadcast":
            message = step.to_bytes(4, "little") * size
            received = group.broadcast(message if rank == 0 else None)
            assert received == message, f"step {step}: a wrong message"
        elif operation == "barrier":
            group.barrier()
        else:
            parts = [
                torch.arange(size, dtype=torch.float32) + step + 1000 * other
                for other in range(world_size)
            ]
            found = getattr(group, operation)(mine, 0)
            if operation == "gather" and rank > 0:
                assert found is None
            else:
                assert torch.equal(found, torch.cat(parts)), f"step {step}: wrong parts"
    group.barrier()
    group.close()
    return num_steps
