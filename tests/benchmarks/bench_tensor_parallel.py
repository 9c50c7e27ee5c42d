"""Tokens per second of one model over several ranks, beside one rank with as many threads.

A random-weight model in which products dominate; the same steps, without a scheduler, in turns. A
ratio of 0.87 is the 15 % that being cut may cost. On a machine that does other things besides,
ranks wait for each other's time slices; the rows of CPU time (of all ranks, per token; the
leader's stands for each) say what the cut itself costs.

    python tests/benchmarks/bench_tensor_parallel.py [--ranks 2] [--repeats 4] [--json FILE]
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

from pagefleet.workers.openmp import WAITS

os.environ.update(WAITS)

from benchmark_report import Row, print_rows, write_json

from pagefleet.scheduler.output import ModelRunnerOutput, SchedulerOutput
from pagefleet.workers.config import WorkerConfig
from pagefleet.workers.executor import make_executor
from pagefleet.workers.model_runner import ModelRunner
from pagefleet.workers.rank_loop import RankLoop
from pagefleet.workers.rank_spec import RankSpec

sys.path.append(str(Path(__file__).parents[1]))
from factories import LlamaShape, make_llama
from model_driver import HandWritten
from rank_processes import RankProcesses

SHAPE = LlamaShape(
    vocab_size=8192,
    hidden_size=1024,
    intermediate_size=4096,
    num_layers=6,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    max_position=1024,
)
PREFILL_TOKENS = 512
BATCHES = (1, 16)
Execute = Callable[[SchedulerOutput], ModelRunnerOutput]
Rates = dict[tuple[str, str], float]  # by (case, metric)


def rank_rates(
    rank: int, world_size: int, folder: str, name: str, num_threads: int, repeats: int
) -> Rates:
    """Tokens per second and CPU time by case, on the leader; the others obey."""
    config = WorkerConfig(
        model=folder, num_blocks=256, num_threads=num_threads, max_num_sequences=32
    )
    runner = ModelRunner.load(config, RankSpec(name, rank, world_size, timeout_s=120.0))
    if rank > 0:
        RankLoop(runner).run()
        return {}
    executor = make_executor(runner)
    rates: Rates = {}
    for case, num_tokens, steps in (
        ("prefill 512", PREFILL_TOKENS, prefill_steps(runner, repeats)),
        *((f"decode x{batch}", batch, decode_steps(runner, batch, repeats)) for batch in BATCHES),
    ):
        wall_s, cpu_s = step_seconds(steps, executor.execute)
        rates[case, "tokens_per_s"] = num_tokens / wall_s
        rates[case, "us"] = cpu_s * world_size / num_tokens * 1e6
    executor.shutdown()
    return rates


def step_seconds(steps: Iterator[SchedulerOutput], execute: Execute) -> tuple[float, float]:
    """Medians of wall and CPU time of a step; the first one prepares the others."""
    execute(next(steps))
    wall: list[float] = []
    cpu: list[float] = []
    for step in steps:
        begin = time.process_time()
        wall.append(execute(step).elapsed_s)
        cpu.append(time.process_time() - begin)
    return statistics.median(wall), statistics.median(cpu)


def prefill_steps(runner: ModelRunner, repeats: int) -> Iterator[SchedulerOutput]:
    for _ in range(1 + repeats):
        hand = HandWritten(runner)
        yield hand.output({0: (0, PREFILL_TOKENS)}, [hand.row(0, range(PREFILL_TOKENS))])


def decode_steps(runner: ModelRunner, batch: int, repeats: int) -> Iterator[SchedulerOutput]:
    hand = HandWritten(runner)
    rows = [hand.row(row, range(row, row + 32), num_blocks=12) for row in range(batch)]
    yield hand.output(dict.fromkeys(range(batch), (0, 32)), rows)
    for step in range(4 * repeats):
        yield hand.output(dict.fromkeys(range(batch), (32 + step, 1)))


def measure(processes: RankProcesses, world_size: int, *args: object) -> Rates:
    for result in (results := processes.run(rank_rates, world_size, *args, timeout_s=1800.0)):
        if not isinstance(result, dict):
            raise SystemExit(f"a rank failed: {result!r}")
    return results[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ours: dict[tuple[str, str], list[float]] = {}
    reference: dict[tuple[str, str], list[float]] = {}
    processes = RankProcesses()
    try:
        with tempfile.TemporaryDirectory() as folder:
            make_llama(Path(folder), SHAPE, scale=1.0)
            for _ in range(options.rounds):
                for found, ranks, threads in (
                    (ours, options.ranks, 1),
                    (reference, 1, options.ranks),
                ):
                    rates = measure(processes, ranks, folder, uuid4().hex, threads, options.repeats)
                    for case, rate in rates.items():
                        found.setdefault(case, []).append(rate)
    finally:
        processes.close()
    # The best round: the others were disturbed by what else the machine did.
    best = {"tokens_per_s": max, "us": min}
    rows = [
        Row(
            case,
            metric,
            best[metric](values),
            best[metric](reference[case, metric]),
            "one rank" if metric == "tokens_per_s" else "one rank, CPU time",
        )
        for (case, metric), values in ours.items()
    ]
    name = f"tensor_parallel, {options.ranks} ranks"
    print_rows(name, rows)
    if options.json:
        write_json(options.json, name, rows)


if __name__ == "__main__":
    main()
