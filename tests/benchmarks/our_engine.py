"""The engine in this process, on the workloads of the benchmarks: no gateway, no network."""

import math
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine_workloads import Workload

from pagefleet.kernels.cpu_library import end_team
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


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. tokens: generated ids by (prompt, sample). prompt_s: until all have their first."""

    seconds: float
    first_token_s: float
    tokens: dict[tuple[int, int], list[int]]
    preemptions: int = 0
    prompt_s: float = math.nan


@dataclass(eq=False)
class Collector:
    """Receives deltas on the engine's thread until every sample has ended."""

    num_samples: int
    began: float
    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    first_token_s: float | None = None
    prompt_s: float = math.nan
    preemptions: int = 0
    problem: str = ""
    ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, step: int, deltas: list[SequenceDelta]) -> None:
        for delta in deltas:
            key = int(delta.request_key), delta.index
            said = self.tokens.setdefault(key, [])
            if delta.token_ids and not said:
                self._note_first_token()
            said.extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.problem = self.problem or delta.error
                self.preemptions += delta.usage.preemptions if delta.usage else 0
                self.num_samples -= 1
        if self.num_samples == 0:
            self.ended.set()

    def _note_first_token(self) -> None:
        self.prompt_s = time.perf_counter() - self.began  # of the last one at the end
        if self.first_token_s is None:
            self.first_token_s = self.prompt_s


class KeptExecutor(LocalExecutor):
    """Runs steps on a runner that outlives the engine: several pools are tried on one model."""

    def shutdown(self) -> None:
        """The runner stays."""


class OurEngine:
    """One loaded model, and an engine with a scheduler of its own for each workload.

    pool_tokens: of the KV pool, where a workload does not say.
    """

    def __init__(
        self,
        folder: Path,
        num_threads: int,
        pool_tokens: int,
        *,
        dtype: str = "float32",
        weight_dtype: str = "auto",
        max_context: int = MAX_CONTEXT,
    ) -> None:
        self._config = WorkerConfig(
            str(folder),
            device="cpu",
            dtype=dtype,
            weight_dtype=weight_dtype,
            num_blocks=pool_tokens // 16,
            max_context=max_context,
            num_threads=num_threads,
        )
        self._pool_tokens = pool_tokens
        self._max_context = max_context
        self._runner = ModelRunner.load(self._config)

    @contextmanager
    def running(
        self, pool_tokens: int | None = None, prefix_caching: bool = True
    ) -> Generator[Engine]:
        """A started engine with an empty cache."""
        end_team()  # of this thread, which has loaded the model and run the reference
        config = replace(self._config, enable_prefix_caching=prefix_caching)
        num_blocks = (pool_tokens or self._pool_tokens) // config.block_size
        identity = CacheIdentity("benchmark", 0, config.dtype, config.block_size)
        scheduler = Scheduler(config.scheduler_config(num_blocks, 0, self._max_context), identity)
        engine = Engine(scheduler, KeptExecutor(self._runner))
        engine.start()
        try:
            yield engine
        finally:
            engine.shutdown()

    def run(self, workload: Workload, prompts: list[list[int]]) -> Measured:
        """All prompts at once; time runs from the first `submit`."""
        with self.running(workload.pool_tokens, workload.prefix_caching) as engine:
            began = time.perf_counter()
            collector = Collector(len(prompts) * workload.n, began)
            for request in requests(workload, prompts):
                engine.submit(request, collector)
            collector.ended.wait()
            seconds = time.perf_counter() - began
        if collector.problem:
            raise RuntimeError(f"{workload.name}: {collector.problem}")
        assert collector.first_token_s is not None
        return Measured(
            seconds,
            collector.first_token_s,
            collector.tokens,
            collector.preemptions,
            collector.prompt_s,
        )


def requests(workload: Workload, prompts: list[list[int]]) -> Iterator[EngineRequest]:
    """Greedy, to the full length; each prompt's number is its key."""
    sampling = SamplingParams(
        max_tokens=workload.num_output_tokens,
        temperature=0.0,
        seed=0,
        n=workload.n,
        ignore_eos=True,
    )
    samples = tuple(SampleStart(index) for index in range(workload.n))
    for key, prompt in enumerate(prompts):
        yield EngineRequest(str(key), tuple(prompt), sampling, samples)
