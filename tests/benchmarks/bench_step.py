"""CPU time that a decode step costs the host: everything around the model, which is taken out.

Schedule, input tensors, sampling of tiny logits, update, deltas to one sink: the whole engine loop
over a model that returns the same hidden states at once. CPU time of the process, all threads; the
reference is what is allowed, 0.25 ms + 8 us per running sequence.

    python tests/benchmarks/bench_step.py [--running 1 32 128 256] [--profile] [--json FILE]
"""

import argparse
import cProfile
import gc
import os
import pstats
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from pagefleet.workers.openmp import WAITS

os.environ.update(WAITS)
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from benchmark_report import Row, print_rows, write_json
from factories import make_llama
from torch import Tensor

from pagefleet.kernels.metadata import AttentionMetadata
from pagefleet.protos.messages import (
    EngineRequest,
    SampleStart,
    SamplingParams,
    SequenceDelta,
)
from pagefleet.workers.config import WorkerConfig
from pagefleet.workers.engine import Engine
from pagefleet.workers.loaded_engine import load_engine

NUM_PROMPT_TOKENS = 64
# Steps. A window has three in which every row needs a block; what else the machine does disturbs
# some of them, so the least counts.
WARM_UP, WINDOW, NUM_WINDOWS = 40, 48, 8
VOCAB = 64


class NoModel:
    """Hidden states and logits that are there already."""

    def __init__(self, max_num_tokens: int) -> None:
        self._hidden = torch.zeros((max_num_tokens, 8))
        self._logits = torch.rand((max_num_tokens, VOCAB))

    def forward(
        self,
        token_ids: Tensor,
        layers: list[Tensor],
        metadata: AttentionMetadata,
        rows: Tensor | None,
    ) -> Tensor:
        return self._hidden[: len(token_ids) if rows is None else len(rows)]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits[: len(hidden)]


@dataclass(eq=False)
class Clock:
    """A sink that notes CPU time and steps once everyone decodes."""

    num_running: int
    steps: int = 0
    began_s: float = 0.0
    windows_s: list[float] = field(default_factory=list)
    profile: cProfile.Profile | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, step: int, deltas: list[SequenceDelta]) -> None:
        if len(deltas) < self.num_running:
            return
        self.steps += 1
        at = self.steps - WARM_UP
        if at == 0:
            if self.profile is not None:
                self.profile.enable()
            self.began_s = time.process_time()
        elif at > 0 and at % WINDOW == 0:
            now = time.process_time()
            self.windows_s.append(now - self.began_s)
            self.began_s = now
            if len(self.windows_s) == NUM_WINDOWS:
                if self.profile is not None:
                    self.profile.disable()
                self.ended.set()


def measure(folder: Path, num_running: int, sampled: bool, overlap: bool, profile: bool) -> float:
    """Microseconds of CPU time per step."""
    num_tokens = NUM_PROMPT_TOKENS + WARM_UP + WINDOW * NUM_WINDOWS + 60
    config = WorkerConfig(
        str(folder),
        device="cpu",
        num_blocks=num_running * -(-num_tokens // 16) + 16,
        max_context=1024,
        max_num_batched_tokens=max(256, num_running * NUM_PROMPT_TOKENS),
        num_threads=1,
        overlap_steps=overlap,
    )
    loaded = load_engine(config)
    engine: Engine = loaded.engine
    loaded.runner.decoder = NoModel(config.max_num_batched_tokens)  # type: ignore[assignment]
    clock = Clock(num_running, profile=cProfile.Profile(time.thread_time) if profile else None)
    for number in range(num_running):
        sampling = SamplingParams(
            temperature=0.8 if sampled else 0.0,
            seed=number,
            max_tokens=num_tokens - NUM_PROMPT_TOKENS,
            ignore_eos=True,
        )
        prompt = tuple((number + place) % VOCAB for place in range(NUM_PROMPT_TOKENS))
        engine.submit(EngineRequest(str(number), prompt, sampling, (SampleStart(0),)), clock)
    gc.collect()
    gc.freeze()  # as a replica does once it has started
    engine.start()
    clock.ended.wait()
    engine.shutdown()
    gc.unfreeze()
    if clock.profile is not None:
        pstats.Stats(clock.profile).sort_stats("tottime").print_stats(28)
    return 1e6 * min(clock.windows_s) / WINDOW


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", nargs="*", type=int, default=[1, 32, 128, 256])
    parser.add_argument("--repeats", type=int, default=3, help="the least of so many counts")
    parser.add_argument("--sampled", action="store_true", help="drawn rather than greedy")
    parser.add_argument("--overlap", action="store_true", help="with overlapped steps")
    parser.add_argument("--profile", action="store_true", help="print where the time goes, too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_llama(
            Path(scratch) / "model", vocab_size=VOCAB, num_layers=1, max_position=1024
        )
        for num_running in options.running:
            arguments = (folder, num_running, options.sampled, options.overlap)
            least = min(measure(*arguments, False) for _ in range(options.repeats))
            allowed = 250.0 + 8.0 * num_running
            rows.append(Row(f"{num_running} running", "us", least, allowed, "allowed"))
            if options.profile:
                measure(*arguments, True)
    print_rows("host work of a decode step, CPU time", rows)
    if options.json:
        write_json(options.json, "step", rows)


if __name__ == "__main__":
    main()
