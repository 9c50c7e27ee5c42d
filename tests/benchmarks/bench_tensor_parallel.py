"""Tokens per second of one model over several ranks, beside one rank with as many threads.

A random-weight model in which products dominate; the same steps, without a scheduler, in turns. A
ratio of 0.87 is the 15 % that being cut may cost.

    python tests/benchmarks/bench_tensor_parallel.py [--ranks 2] [--repeats 7] [--json FILE]
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when OpenMP's runtime is loaded

from benchmark_report import Row, print_rows, write_json

from pagefleet.scheduler.output import ModelRunnerOutput, SchedulerOutput
from pagefleet.workers.config import WorkerConfig
from pagefleet.workers.executor import make_executor
from pagefleet.workers.model_runner import ModelRunner
from pagefleet.workers.rank_loop import RankLoop
from pagefleet.workers.rendezvous import RankSpec

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


def rank_rates(
    rank: int, world_size: int, folder: str, name: str, num_threads: int, repeats: int
) -> dict[str, float]:
    """Tokens per second by case, on the leader; the others obey."""
    config = WorkerConfig(
        model=folder, num_blocks=256, num_threads=num_threads, max_num_sequences=32
    )
    runner = ModelRunner.load(config, RankSpec(name, rank, world_size, timeout_s=120.0))
    if rank > 0:
        RankLoop(runner).run()
        return {}
    executor = make_executor(runner)
    rates = {"prefill 512": prefill_rate(runner, executor.execute, repeats)}
    for batch in BATCHES:
        rates[f"decode x{batch}"] = decode_rate(runner, executor.execute, batch, repeats)
    executor.shutdown()
    return rates


def prefill_rate(runner: ModelRunner, execute: Execute, repeats: int) -> float:
    seconds: list[float] = []
    for _ in range(repeats):
        hand = HandWritten(runner)
        new = hand.row(0, range(PREFILL_TOKENS))
        seconds.append(execute(hand.output({0: (0, PREFILL_TOKENS)}, [new])).elapsed_s)
    return PREFILL_TOKENS / statistics.median(seconds)


def decode_rate(runner: ModelRunner, execute: Execute, batch: int, repeats: int) -> float:
    hand = HandWritten(runner)
    rows = [hand.row(row, range(row, row + 32), num_blocks=12) for row in range(batch)]
    execute(hand.output(dict.fromkeys(range(batch), (0, 32)), rows))
    seconds = [
        execute(hand.output(dict.fromkeys(range(batch), (32 + step, 1)))).elapsed_s
        for step in range(4 * repeats)
    ]
    return batch / statistics.median(seconds)


def measure(processes: RankProcesses, world_size: int, *args: object) -> dict[str, float]:
    for result in (results := processes.run(rank_rates, world_size, *args)):
        if not isinstance(result, dict):
            raise SystemExit(f"a rank failed: {result!r}")
    return results[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ours: dict[str, list[float]] = {}
    reference: dict[str, list[float]] = {}
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
    rows = [
        Row(case, "tokens_per_s", max(ours[case]), max(reference[case]), "one rank")
        for case in ours
    ]
    name = f"tensor_parallel, {options.ranks} ranks"
    print_rows(name, rows)
    if options.json:
        write_json(options.json, name, rows)


if __name__ == "__main__":
    main()
