"""Tokens per second, time to first token and ms per token: ours beside `transformers` generate.

Both run in this process, in float32, greedy, on the same token ids and threads; the median of
`--repeats` runs is reported, and whether the tokens are equal. With PEER_VLLM_PYTHON set to the
interpreter of an environment with vLLM, it runs the same workloads too.

    python tests/benchmarks/bench_engine.py [--model DIR | --shape smollm2] [--json FILE]
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when OpenMP's runtime is loaded

import torch
from benchmark_report import Row, print_rows, write_json
from engine_workloads import SHAPES, WORKLOADS, Shape, Workload
from peer_vllm import run_vllm
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from pagefleet.protos.messages import (
    CacheIdentity,
    EngineRequest,
    SampleStart,
    SamplingParams,
    SequenceDelta,
)
from pagefleet.scheduler.scheduler import Scheduler
from pagefleet.workers.config import WorkerConfig
from pagefleet.workers.engine import Engine
from pagefleet.workers.executor import LocalExecutor
from pagefleet.workers.model_runner import ModelRunner

MAX_CONTEXT = 2048
POOL_TOKENS = 32 * 1024


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. tokens: generated ids by (prompt, sample)."""

    seconds: float
    first_token_s: float
    tokens: dict[tuple[int, int], list[int]]
    preemptions: int = 0


@dataclass(eq=False)
class Collector:
    """Receives deltas on the engine's thread until every sample has ended."""

    num_samples: int
    began: float
    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    first_token_s: float | None = None
    preemptions: int = 0
    problem: str = ""
    ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, step: int, deltas: list[SequenceDelta]) -> None:
        for delta in deltas:
            key = int(delta.request_key), delta.index
            self.tokens.setdefault(key, []).extend(delta.token_ids)
            if delta.token_ids and self.first_token_s is None:
                self.first_token_s = time.perf_counter() - self.began
            if delta.finish_reason is not None:
                self.problem = self.problem or delta.error
                self.preemptions += delta.usage.preemptions if delta.usage else 0
                self.num_samples -= 1
        if self.num_samples == 0:
            self.ended.set()


class KeptExecutor(LocalExecutor):
    """Runs steps on a runner that outlives the engine: several pools are tried on one model."""

    def shutdown(self) -> None:
        """The runner stays."""


class OurEngine:
    """The engine in this process, with a scheduler of its own for each workload."""

    name = "pagefleet"

    def __init__(self, folder: Path, num_threads: int) -> None:
        self._config = WorkerConfig(
            str(folder),
            device="cpu",
            dtype="float32",
            num_blocks=POOL_TOKENS // 16,
            max_context=MAX_CONTEXT,
            num_threads=num_threads,
        )
        self._runner = ModelRunner.load(self._config)

    def run(self, workload: Workload, prompts: list[list[int]]) -> Measured:
        num_blocks = (workload.pool_tokens or POOL_TOKENS) // self._config.block_size
        config = replace(self._config, enable_prefix_caching=workload.prefix_caching)
        identity = CacheIdentity("benchmark", 0, "float32", config.block_size)
        scheduler = Scheduler(config.scheduler_config(num_blocks, 0, MAX_CONTEXT), identity)
        engine = Engine(scheduler, KeptExecutor(self._runner))
        engine.start()
        try:
            return self._run(engine, workload, prompts)
        finally:
            engine.shutdown()

    def _run(self, engine: Engine, workload: Workload, prompts: list[list[int]]) -> Measured:
        sampling = SamplingParams(
            max_tokens=workload.num_output_tokens,
            temperature=0.0,
            seed=0,
            n=workload.n,
            ignore_eos=True,
        )
        samples = tuple(SampleStart(index) for index in range(workload.n))
        began = time.perf_counter()
        collector = Collector(len(prompts) * workload.n, began)
        for key, prompt in enumerate(prompts):
            engine.submit(EngineRequest(str(key), tuple(prompt), sampling, samples), collector)
        collector.ended.wait()
        seconds = time.perf_counter() - began
        if collector.problem:
            raise RuntimeError(f"{workload.name}: {collector.problem}")
        assert collector.first_token_s is not None
        return Measured(seconds, collector.first_token_s, collector.tokens, collector.preemptions)


class Transformers:
    """`generate` on the whole batch at once; every prompt of a workload has the same length."""

    name = "transformers"

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(self, workload: Workload, prompts: list[list[int]]) -> Measured:
        batch = torch.tensor(prompts).repeat_interleave(workload.n, dim=0)
        began = time.perf_counter()
        self._generate(batch, 1)
        first_token_s = time.perf_counter() - began
        began = time.perf_counter()
        output = self._generate(batch, workload.num_output_tokens)
        seconds = time.perf_counter() - began
        rows = output[:, batch.shape[1] :].tolist()
        keys = ((row // workload.n, row % workload.n) for row in range(len(rows)))
        return Measured(seconds, first_token_s, dict(zip(keys, rows, strict=True)))

    @torch.inference_mode()
    def _generate(self, batch: torch.Tensor, num_tokens: int) -> torch.Tensor:
        return self._model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )


def median(runs: list[Measured]) -> Measured:
    """The run of median length."""
    middle = statistics.median_low(run.seconds for run in runs)
    return next(run for run in runs if run.seconds == middle)


def compare(workload: Workload, ours: Measured, theirs: Measured, name: str) -> list[Row]:
    def row(metric: str, value: float, reference: float) -> Row:
        return Row(workload.name, metric, value, reference, name)

    def speed(run: Measured) -> float:
        return workload.num_generated / run.seconds

    def ms_per_token(run: Measured) -> float:
        return 1000 * (run.seconds - run.first_token_s) / (workload.num_output_tokens - 1)

    rows = [row("tokens_per_s", speed(ours), speed(theirs))]
    if workload.num_prompts == 1:
        rows.append(row("ttft_ms", 1000 * ours.first_token_s, 1000 * theirs.first_token_s))
        rows.append(row("ms_per_token", ms_per_token(ours), ms_per_token(theirs)))
    return rows


def run_all(
    folder: Path, workloads: list[Workload], repeats: int, num_threads: int, vocab: int
) -> list[Row]:
    torch.set_num_threads(num_threads)
    transformers_logging.disable_progress_bar()
    prompts = {workload.name: workload.prompts(vocab) for workload in workloads}
    theirs, ours = Transformers(folder), OurEngine(folder, num_threads)
    for engine in (theirs, ours):  # warm-up
        engine.run(replace(WORKLOADS[0], num_output_tokens=4), prompts[workloads[0].name][:1])
    our_runs: dict[str, Measured] = {}
    their_runs: dict[str, Measured] = {}
    for workload in workloads:
        _run_both(workload, prompts[workload.name], repeats, ours, theirs, our_runs, their_runs)
    rows: list[Row] = []
    for workload in workloads:
        our_run, their_run = our_runs[workload.name], their_runs[workload.same_as or workload.name]
        rows += compare(workload, our_run, their_run, Transformers.name)
        _print_equality(workload, our_run, their_run)
    rows += _pool_and_cache_rows(workloads, our_runs)
    for name, seconds in run_vllm(folder, workloads, prompts, repeats).items():
        workload = next(workload for workload in workloads if workload.name == name)
        speed = workload.num_generated / seconds
        our_speed = workload.num_generated / our_runs[name].seconds
        rows.append(Row(name, "tokens_per_s", our_speed, speed, "vLLM"))
    return rows


def _run_both(
    workload: Workload,
    prompts: list[list[int]],
    repeats: int,
    ours: OurEngine,
    theirs: Transformers,
    our_runs: dict[str, Measured],
    their_runs: dict[str, Measured],
) -> None:
    """In turn, so that what else the machine does meets both alike."""
    own: list[Measured] = []
    other: list[Measured] = []
    their_name = workload.same_as or workload.name
    for _ in range(repeats):
        if their_name not in their_runs:
            other.append(theirs.run(workload, prompts))
        own.append(ours.run(workload, prompts))
    our_runs[workload.name] = median(own)
    if other:
        their_runs[their_name] = median(other)
    seconds = our_runs[workload.name].seconds, their_runs[their_name].seconds
    print(f"{workload.name:<14} ours {seconds[0]:7.2f} s, theirs {seconds[1]:7.2f} s", flush=True)


def _print_equality(workload: Workload, ours: Measured, theirs: Measured) -> None:
    equal = sum(ours.tokens[key] == tokens for key, tokens in theirs.tokens.items())
    print(f"{workload.name}: {equal} of {len(theirs.tokens)} samples have the same tokens")


def _pool_and_cache_rows(workloads: list[Workload], ours: dict[str, Measured]) -> list[Row]:
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


def save_random(shape: Shape, folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def read_vocab_size(folder: Path) -> int:
    return LlamaConfig.from_pretrained(folder).vocab_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, help="a checkpoint folder")
    which.add_argument("--shape", choices=SHAPES, default="4x256", help="random weights")
    parser.add_argument("--workload", nargs="*", help="names; all where absent")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = [w for w in WORKLOADS if not options.workload or w.name in options.workload]
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model
        if folder is None:
            folder = Path(scratch)
            save_random(SHAPES[options.shape], folder)
        vocab = read_vocab_size(folder)
        rows = run_all(folder, chosen, options.repeats, options.threads, vocab)
    name = f"engine, {options.model.name if options.model else options.shape}"
    print_rows(name, rows)
    if options.json:
        write_json(options.json, name, rows)


if __name__ == "__main__":
    main()
