"""What a prompt costs, and each token after it as the context grows: ours beside ours.

Prompt time runs until every sample has its first token: with the prefix cache beside without it,
of four samples beside one. Decode steps are those of one sequence; growth is what a thousand more
tokens of context add to one, from half of the longest context on beside up to there.

    python tests/benchmarks/bench_prompts.py [--shape smollm2] [--contexts 1024 ...] [--json FILE]
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pagefleet.workers.openmp import WAITS

os.environ.update(WAITS)

import torch
from benchmark_report import Row, print_rows, write_json
from engine_workloads import SHAPES, WORKLOADS, Workload
from our_engine import Measured, OurEngine
from random_checkpoints import save_random

CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768)
NUM_STEPS = 128


def medians_in_turn(
    engine: OurEngine, workloads: list[Workload], vocab: int, repeats: int
) -> list[Measured]:
    """The run of median prompt time of each."""
    prompts = [workload.prompts(vocab) for workload in workloads]
    runs: list[list[Measured]] = [[] for _ in workloads]
    for _ in range(repeats):
        for done, workload, given in zip(runs, workloads, prompts, strict=True):
            done.append(engine.run(workload, given))
    return [sorted(done, key=lambda run: run.prompt_s)[len(done) // 2] for done in runs]


def prompt_rows(engine: OurEngine, vocab: int, repeats: int) -> Iterator[Row]:
    named = {workload.name: workload for workload in WORKLOADS}
    few = {name: replace(named[name], num_output_tokens=2) for name in named}
    one = replace(few["nsample"], name="one sample", n=1, same_as="nsample")
    pairs = (
        ("prefix32", few["prefix32"], few["prefix32-off"], "without the prefix cache"),
        ("4 samples", few["nsample"], one, "1 sample"),
    )
    for case, ours, reference, name in pairs:
        measured = medians_in_turn(engine, [ours, reference], vocab, repeats)
        seconds = [1000 * run.prompt_s for run in measured]
        yield Row(case, "prompt_ms", *seconds, name)


def context_rows(engine: OurEngine, vocab: int, contexts: list[int], repeats: int) -> Iterator[Row]:
    steps: list[float] = []
    for context in contexts:
        # The steps' contexts lie around it.
        workload = Workload(str(context), 1, context - NUM_STEPS // 2, NUM_STEPS + 1)
        prompts = workload.prompts(vocab)
        runs = [engine.run(workload, prompts) for _ in range(repeats)]
        times = [1000 * (run.seconds - run.first_token_s) / NUM_STEPS for run in runs]
        steps.append(statistics.median(times))
        yield Row(f"context {context // 1024}k", "ms_per_token", steps[-1], None, "")
    half = max(i for i, context in enumerate(contexts) if context <= contexts[-1] // 2)
    upper = (steps[-1] - steps[half]) / (contexts[-1] - contexts[half])
    lower = (steps[half] - steps[0]) / (contexts[half] - contexts[0])
    yield Row("growth", "us_per_1k", 1e6 * upper, 1e6 * lower, "that of the lower half")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="4x256")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="ascending")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape, longest = SHAPES[options.shape], options.contexts[-1] + NUM_STEPS
    with tempfile.TemporaryDirectory() as scratch:
        save_random(shape, Path(scratch), max_context=longest)
        pool_tokens = max(longest, 20480) + 1024
        engine = OurEngine(Path(scratch), options.threads, pool_tokens, max_context=longest)
    rows = list(prompt_rows(engine, shape.vocab, options.repeats))
    rows += context_rows(engine, shape.vocab, options.contexts, options.repeats)
    name = f"prompts, {options.shape}"
    print_rows(name, rows)
    if options.json:
        write_json(options.json, name, rows)


if __name__ == "__main__":
    main()
