"""Microseconds of a collective between CPU ranks of this host: shared memory beside gloo.

Both run in the same processes, turn and turn about, one thread per rank; the median is reported. A
step's time is from the leader's encoding of it to the last rank's having decoded it; the
reference sends the same object with `broadcast_object_list`.

    python tests/benchmarks/bench_all_reduce.py [--ranks 2] [--repeats 500] [--json FILE]
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pagefleet.workers.openmp import WAITS

os.environ.update(WAITS)

import numpy as np
import torch
import torch.distributed as dist
from benchmark_report import Row, print_rows, write_json
from torch import Tensor

from pagefleet.protos.messages import SamplingParams
from pagefleet.scheduler.output import NewRow, SchedulerOutput
from pagefleet.workers.parallel import TensorParallelGroup
from pagefleet.workers.shared_memory_group import SharedMemoryGroup
from pagefleet.workers.step_codec import StepKind, StepMessage, decode_step, encode_step
from pagefleet.workers.torch_group import TorchDistributedGroup, host_store, open_store

sys.path.append(str(Path(__file__).parents[1]))
from rank_processes import RankProcesses

TIMEOUT_S = 60.0
SIZES = {"4 KB": 1024, "64 KB": 16384, "256 KB": 65536, "1 MB": 262144}
WARM_UP = 20

Timings = dict[tuple[str, str], list[float]]


def rank_times(rank: int, world_size: int, name: str, repeats: int, port_file: str) -> Timings:
    """Every call's times by (case, transport): seconds taken, or for steps the clock's reading
    when it began (on the leader) or ended (on the others)."""
    shared = SharedMemoryGroup(name, rank, world_size, timeout_s=TIMEOUT_S)
    if rank == 0:
        store = host_store("127.0.0.1", TIMEOUT_S)
        Path(port_file).write_text(str(store.port))
    shared.barrier()
    if rank != 0:
        store = open_store("127.0.0.1", int(Path(port_file).read_text()), TIMEOUT_S)
    gloo = TorchDistributedGroup(
        store, name, rank, world_size, device=torch.device("cpu"), timeout_s=TIMEOUT_S
    )
    groups: dict[str, TensorParallelGroup] = {"ours": shared, "gloo": gloo}
    times: Timings = {}
    for case, size in SIZES.items():
        for dtype, label in ((torch.float32, case), (torch.bfloat16, f"{case} bf16")):
            if dtype == torch.bfloat16 and case != "64 KB":
                continue
            tensor = torch.zeros(size * 4 // dtype.itemsize, dtype=dtype)
            for transport, group in groups.items():
                call = all_reduce_of(group, tensor)
                times[f"sum {label}", transport] = timed(call, shared, repeats)
    for case, message in step_messages().items():
        for transport in groups:
            call = send_ours if transport == "ours" else send_object
            times[case, transport] = [
                call(shared, message if rank == 0 else None) for _ in range(repeats)
            ]
    shared.barrier()
    gloo.close()
    shared.close()
    return times


def all_reduce_of(group: TensorParallelGroup, tensor: Tensor) -> Callable[[], None]:
    return lambda: group.all_reduce(tensor)


def timed(call: Callable[[], None], barrier: SharedMemoryGroup, repeats: int) -> list[float]:
    times: list[float] = []
    for _ in range(repeats):
        barrier.barrier()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return times


def send_ours(group: SharedMemoryGroup, message: StepMessage | None) -> float:
    group.barrier()
    begin = time.monotonic()
    received = group.broadcast(None if message is None else encode_step(message))
    if message is None:
        decode_step(received)
        return time.monotonic()
    return begin


def send_object(group: SharedMemoryGroup, message: StepMessage | None) -> float:
    group.barrier()
    begin = time.monotonic()
    dist.broadcast_object_list([message], 0)
    return begin if message is not None else time.monotonic()


def step_messages() -> dict[str, StepMessage]:
    """A decode step of 64 sequences, and one that admits a prompt of 1,000 tokens besides."""
    rows = np.arange(64, dtype=np.int32)
    decodes = SchedulerOutput(
        step=1,
        rows=rows,
        num_scheduled_tokens=rows,
        num_computed_tokens=rows,
        sample_entries=rows,
        sample_rows=rows,
    )
    prompt = np.arange(1000, dtype=np.int32)
    table = np.arange(63, dtype=np.int32)
    new = NewRow(64, 7, prompt, 1000, table, SamplingParams(temperature=0.7, seed=1), 0)
    admits = replace(decodes, new_rows=(new,))
    return {
        "step 64 decodes": StepMessage(StepKind.EXECUTE, decodes, rows),
        "step and a prompt": StepMessage(StepKind.EXECUTE, admits, rows),
    }


def median_us(case: str, transport: str, by_rank: list[Timings]) -> float:
    columns = [times[case, transport][WARM_UP:] for times in by_rank]
    if case.startswith("step"):
        leader, *others = columns
        worst = [max(ends) - begin for begin, *ends in zip(leader, *others, strict=True)]
    else:
        worst = [max(calls) for calls in zip(*columns, strict=True)]
    return statistics.median(worst) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    processes = RankProcesses()
    name = f"bench-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = processes.run(
                rank_times,
                options.ranks,
                name,
                options.repeats + WARM_UP,
                f"{folder}/port",
                timeout_s=600.0,
            )
        finally:
            processes.close()
    by_rank: list[Timings] = []
    for times in found:
        if not isinstance(times, dict):
            raise SystemExit(f"a rank failed: {times!r}")
        by_rank.append(times)
    rows = [
        Row(
            case,
            "us",
            median_us(case, "ours", by_rank),
            median_us(case, "gloo", by_rank),
            "gloo, pickled" if case.startswith("step") else "gloo",
        )
        for case, transport in by_rank[0]
        if transport == "ours"
    ]
    print_rows(f"all_reduce, {options.ranks} ranks", rows)
    if options.json:
        write_json(options.json, f"all_reduce, {options.ranks} ranks", rows)


if __name__ == "__main__":
    main()
