"""Tokens per second with `--speculative ngram` on, beside the same engine with it off.

On text that repeats itself (copy a text, edit a program), on free text, and on text drawn at a high
temperature, where most guesses are wrong: that row says what guessing costs where it does not pay.
Greedy tokens must be the same but for near ties. On and off run in turn; medians.

    python tests/benchmarks/bench_speculation.py [--model DIR] [--batch 1 8] [--json FILE]
"""

import argparse
import os
import statistics
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from pagefleet.workers.openmp import WAITS

os.environ.update(WAITS)

from benchmark_report import Row, print_rows, write_json
from rich.progress import Progress

from pagefleet.cluster import default_model
from pagefleet.cluster.tokenizer import Tokenizer
from pagefleet.protos.messages import (
    CacheIdentity,
    EngineRequest,
    SampleStart,
    SamplingParams,
    SequenceDelta,
)
from pagefleet.scheduler.scheduler import Scheduler
from pagefleet.scheduler.stats import SchedulerStats
from pagefleet.workers.config import WorkerConfig
from pagefleet.workers.engine import Engine
from pagefleet.workers.executor import LocalExecutor
from pagefleet.workers.loaded_engine import load_engine
from pagefleet.workers.model_runner import ModelRunner

POEM = (
    "The river runs beneath the stone, the stone keeps watch above the river. "
    "A heron waits among the reeds and will not wait for ever. "
    "The miller counts his sacks of rye, the sacks are twenty-seven; "
    "he lays them down beside the wall and looks up to the heaven. "
)
PROGRAM = """def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("width and height must not be negative")
    return width * height

def volume(width, height, depth):
    if width < 0 or height < 0 or depth < 0:
        raise ValueError("width, height and depth must not be negative")
    return width * height * depth
"""
TASKS = {
    "copy": ("Repeat this text word for word:\n" + POEM, 0.0),
    "edit": ("Write this program again, with docstrings:\n" + PROGRAM, 0.0),
    "free": ("Tell me a story about a heron and a miller.", 0.0),
    "drawn": ("Tell me a story about a heron and a miller.", 1.2),
}


@dataclass(frozen=True, slots=True)
class Measured:
    seconds: float
    tokens: dict[str, list[int]]
    stats: SchedulerStats


@dataclass(eq=False)
class Collector:
    """Receives deltas on the engine's thread until every request has ended."""

    num_open: int
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, step: int, deltas: list[SequenceDelta]) -> None:
        for delta in deltas:
            self.tokens.setdefault(delta.request_key, []).extend(delta.token_ids)
            self.num_open -= delta.finish_reason is not None
        if not self.num_open:
            self.ended.set()


class KeptExecutor(LocalExecutor):
    """The runner outlives the engine."""

    def shutdown(self) -> None:
        """The runner stays."""


class Bench:
    """One model, and an engine with a scheduler of its own for each run."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        self._config = WorkerConfig(
            str(folder),
            device="cpu",
            num_blocks=4096,
            max_context=2048,
            num_threads=num_threads,
            enable_prefix_caching=False,
        )
        loaded = load_engine(self._config)
        self._runner: ModelRunner = loaded.runner
        self._rate = loaded.speed.prefill_tokens_per_s
        self.tokenizer = Tokenizer.load(folder)

    def run(self, prompts: list[list[int]], temperature: float, num: int, method: str) -> Measured:
        config = replace(self._config, speculative=method)
        settings = config.scheduler_config(self._runner.num_blocks, 0, 2048)
        settings = replace(settings, prefill_tokens_per_s=self._rate)
        scheduler = Scheduler(settings, CacheIdentity("benchmark", 0, "float32", 16))
        engine = Engine(scheduler, KeptExecutor(self._runner))
        collector = Collector(len(prompts))
        began = time.perf_counter()
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(
                temperature=temperature, seed=number, max_tokens=num, ignore_eos=True
            )
            key = str(number)
            engine.submit(EngineRequest(key, tuple(prompt), sampling, (SampleStart(0),)), collector)
        engine.start()
        collector.ended.wait()
        seconds = time.perf_counter() - began
        stats = engine.call(Scheduler.stats).result()
        engine.shutdown()
        return Measured(seconds, collector.tokens, stats)


def compare(bench: Bench, task: str, batch: int, num_tokens: int, repeats: int) -> Row:
    text, temperature = TASKS[task]
    template = bench.tokenizer.chat_template
    if template is not None:
        text = template.render([{"role": "user", "content": text}])
    prompts = [bench.tokenizer.encode(text, add_special_tokens=False)] * batch
    runs: dict[str, list[Measured]] = {"off": [], "ngram": []}
    for _ in range(repeats):
        for method, found in runs.items():
            found.append(bench.run(prompts, temperature, num_tokens, method))
    on, off = runs["ngram"][0], runs["off"][0]
    equal = sum(on.tokens[key] == tokens for key, tokens in off.tokens.items())
    print(
        f"{task} {batch}: {equal} of {batch} have the same tokens; "
        f"{on.stats.accepted_tokens:,} of {on.stats.draft_tokens:,} guesses were right",
        flush=True,
    )
    speeds = (
        batch * num_tokens / statistics.median(run.seconds for run in runs[method])
        for method in ("ngram", "off")
    )
    return Row(f"{task}, batch {batch}", "tokens_per_s", *speeds, "ours without guessing")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a checkpoint folder; SmolLM2-135M if absent")
    parser.add_argument("--task", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with Progress() as progress:
        folder = options.model or default_model.fetch(progress)
    bench = Bench(folder, options.threads)
    bench.run([[1, 2, 3]], 0.0, 4, "off")  # warm-up
    rows = [
        compare(bench, task, batch, options.tokens, options.repeats)
        for batch in options.batch
        for task in options.task
    ]
    print_rows("guessing ahead", rows)
    if options.json:
        write_json(options.json, "guessing ahead", rows)


if __name__ == "__main__":
    main()
