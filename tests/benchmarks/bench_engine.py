"""Tokens per second, time to first token and ms per token: ours beside what a user has instead.

Ours and `transformers` generate run in this process, greedy, on the same token ids and threads, in
turn; the median of `--repeats` runs is reported, and whether the tokens are equal. With
PEER_VLLM_PYTHON set to the interpreter of an environment with vLLM, it runs the same workloads
right after. The limit of the machine is what its bandwidth and GEMM rate allow, both measured
before and after each run of ours.

With `--continuous` the requests of `transformers` go through its continuous batching.
With `--stored bfloat16` the checkpoint is bfloat16, as published ones are; all compute in float32.
With `--weight-dtype bfloat16` ours reads narrow weights, with `--dtype bfloat16` it computes with
them; the reference is ours in float32 and vLLM in bfloat16.

    python tests/benchmarks/bench_engine.py [--model DIR | --shape smollm2] [--json FILE]
"""

import argparse
import math
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from pagefleet.workers.openmp import WAITS

os.environ.update(WAITS)

import torch
from benchmark_report import Row, print_rows, write_json
from engine_workloads import SHAPES, WORKLOADS, Workload
from machine_limits import Machine
from our_engine import Measured, OurEngine
from peer_transformers import ContinuousTransformers, Transformers
from peer_vllm import PeerRun, run_vllm
from random_checkpoints import save_random
from transformers import LlamaConfig
from transformers.utils import logging as transformers_logging

Tokens = dict[tuple[int, int], list[int]]


class Contender(Protocol):
    """What runs the workloads in this process."""

    def run(self, workload: Workload, prompts: list[list[int]]) -> Measured: ...


def median(runs: list[Measured]) -> Measured:
    """The run of median length."""
    middle = statistics.median_low(run.seconds for run in runs)
    return next(run for run in runs if run.seconds == middle)


def compare(
    workload: Workload, ours: Measured, theirs: "Measured | PeerRun", name: str
) -> list[Row]:
    def row(metric: str, value: float, reference: float) -> Row:
        return Row(workload.name, metric, value, reference, name)

    def ms_per_token(run: "Measured | PeerRun") -> float:
        return 1000 * (run.seconds - run.first_token_s) / (workload.num_output_tokens - 1)

    num = workload.num_generated
    rows = [row("tokens_per_s", num / ours.seconds, num / theirs.seconds)]
    if workload.num_prompts == 1:
        rows.append(row("ttft_ms", 1000 * ours.first_token_s, 1000 * theirs.first_token_s))
        rows.append(row("ms_per_token", ms_per_token(ours), ms_per_token(theirs)))
    return rows


def run_all(folder: Path, workloads: list[Workload], options: argparse.Namespace) -> list[Row]:
    torch.set_num_threads(options.threads)
    transformers_logging.disable_progress_bar()
    model = LlamaConfig.from_pretrained(folder)
    is_narrow = options.weight_dtype != "auto" or options.dtype != "float32"
    weight_bytes = 2 if is_narrow or model.dtype == torch.bfloat16 else 4
    prompts = {workload.name: workload.prompts(model.vocab_size) for workload in workloads}
    widths = {"weight_dtype": options.weight_dtype, "dtype": options.dtype}
    ours = OurEngine(folder, options.threads, options.pool_tokens, **widths)
    if is_narrow:
        name = "ours in float32"
        theirs: Contender = OurEngine(folder, options.threads, options.pool_tokens)
    else:
        name = "transformers, continuous" if options.continuous else "transformers"
        theirs = ContinuousTransformers(folder) if options.continuous else Transformers(folder)
    for engine in (theirs, ours):  # warm-up
        engine.run(replace(WORKLOADS[0], num_output_tokens=4), prompts[workloads[0].name][:1])
    our_runs, their_runs, machines = run_in_turn(workloads, prompts, options.repeats, ours, theirs)
    del theirs
    rows: list[Row] = []
    for workload in workloads:
        their_run = their_runs[workload.same_as or workload.name]
        rows += compare(workload, our_runs[workload.name], their_run, name)
        print_equality(workload, our_runs[workload.name].tokens, their_run.tokens, name)
    rows += pool_and_cache_rows(workloads, our_runs)
    rows += limit_rows(
        workloads, our_runs, lambda w: machines[w.name].seconds(w, model, weight_bytes)
    )
    peer_dtype = "bfloat16" if is_narrow else "float32"
    peer_runs = run_vllm(
        folder, workloads, prompts, options.repeats, options.pool_tokens, peer_dtype
    )
    for workload in workloads:
        if workload.name in peer_runs:
            peer_run = peer_runs[workload.name]
            rows += compare(workload, our_runs[workload.name], peer_run, "vLLM")
            print_equality(workload, our_runs[workload.name].tokens, peer_run.tokens, "vLLM")
    return rows + [mean_row(rows, reference) for reference in (name, *["vLLM"] * bool(peer_runs))]


def run_in_turn(
    workloads: list[Workload],
    prompts: dict[str, list[list[int]]],
    repeats: int,
    ours: Contender,
    theirs: Contender,
) -> tuple[dict[str, Measured], dict[str, Measured], dict[str, Machine]]:
    """One run of each, then the next: what else the machine does meets both alike, and what it is
    capable of is measured before and after each run of ours."""
    our_runs: dict[str, Measured] = {}
    their_runs: dict[str, Measured] = {}
    machines: dict[str, Machine] = {}
    for workload in workloads:
        own: list[Measured] = []
        other: list[Measured] = []
        seen: list[Machine] = []
        their_name = workload.same_as or workload.name
        for _ in range(repeats):
            if their_name not in their_runs:
                other.append(theirs.run(workload, prompts[workload.name]))
            seen.append(Machine.measure())
            own.append(ours.run(workload, prompts[workload.name]))
            seen.append(Machine.measure())
        our_runs[workload.name] = median(own)
        machines[workload.name] = machine = Machine.median(seen)
        if other:
            their_runs[their_name] = median(other)
        seconds = our_runs[workload.name].seconds, their_runs[their_name].seconds
        print(
            f"{workload.name:<14} ours {seconds[0]:7.2f} s, theirs {seconds[1]:7.2f} s, at "
            f"{machine.bandwidth / 1e9:.1f} GB/s and {machine.flops / 1e9:.0f} GFLOP/s",
            flush=True,
        )
    return our_runs, their_runs, machines


def print_equality(workload: Workload, ours: Tokens, theirs: Tokens, name: str) -> None:
    equal = sum(ours[key] == tokens for key, tokens in theirs.items())
    print(f"{workload.name}: {equal} of {len(theirs)} samples have the same tokens as {name}")


def pool_and_cache_rows(workloads: list[Workload], ours: dict[str, Measured]) -> list[Row]:
    """Ours against ours: what a tight pool costs, and what the prefix cache brings."""
    by_name = {workload.name: workload for workload in workloads}
    rows: list[Row] = []
    for case, base, label in (
        ("tight", "loose", "ours with a loose pool"),
        ("prefix32", "prefix32-off", "ours without prefix caching"),
    ):
        if case in ours and base in ours:
            num = by_name[case].num_generated
            speeds = num / ours[case].seconds, num / ours[base].seconds
            rows.append(Row(case, "tokens_per_s", *speeds, label))
    if "tight" in ours:
        print(f"tight: {ours['tight'].preemptions} preemptions")
    return rows


def limit_rows(
    workloads: list[Workload], ours: dict[str, Measured], least_s: Callable[[Workload], float]
) -> list[Row]:
    return [
        Row(
            workload.name,
            "tokens_per_s",
            workload.num_generated / ours[workload.name].seconds,
            workload.num_generated / least_s(workload),
            "limit of the machine",
        )
        for workload in workloads
        if workload.pool_tokens is None
    ]


def mean_row(rows: list[Row], name: str) -> Row:
    """The geometric mean of the ratios of tokens/s."""
    speeds = [row for row in rows if row.reference_name == name and row.metric == "tokens_per_s"]
    ratios = [row.ratio for row in speeds if row.ratio is not None]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    return Row("geometric mean", "ratio", mean, 1.0, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, help="a checkpoint folder")
    which.add_argument("--shape", choices=SHAPES, default="4x256", help="random weights")
    parser.add_argument("--workload", nargs="*", help="names; all where absent")
    parser.add_argument("--continuous", action="store_true", help="batching by transformers")
    parser.add_argument("--stored", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--weight-dtype", default="auto", choices=("auto", "bfloat16", "int8"))
    parser.add_argument("--pool-tokens", type=int, default=32 * 1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = [w for w in WORKLOADS if not options.workload or w.name in options.workload]
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model
        if folder is None:
            folder = Path(scratch)
            save_random(SHAPES[options.shape], folder, getattr(torch, options.stored))
        rows = run_all(folder, chosen, options)
    name = f"engine, {options.model.name if options.model else options.shape}"
    if options.stored != "float32":
        name += f", stored as {options.stored}"
    if options.dtype != "float32":
        name += f", {options.dtype}"
    if options.weight_dtype != "auto":
        name += f", {options.weight_dtype} weights"
    print_rows(name, rows)
    if options.json:
        write_json(options.json, name, rows)


if __name__ == "__main__":
    main()
