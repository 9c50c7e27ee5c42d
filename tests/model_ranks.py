"""What the ranks of tests/workers/test_tensor_parallel.py do. Module-level, so that they can be
sent to other processes."""

import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from model_driver import Answer, all_logits, serve
from rank_programs import meet_at
from torch import Tensor

from pagefleet.kernels.select import ENVIRONMENT_VARIABLE
from pagefleet.protos.messages import EngineRequest
from pagefleet.scheduler.output import CopyDone, ModelRunnerOutput, SchedulerOutput
from pagefleet.workers.config import WorkerConfig
from pagefleet.workers.executor import Executor, make_executor
from pagefleet.workers.model_runner import ModelRunner
from pagefleet.workers.parallel import GroupError
from pagefleet.workers.rank_loop import RankLoop
from pagefleet.workers.rank_spec import RankSpec, Transport

Settings = dict[str, object]


def load_rank(
    rank: int, world_size: int, folder: Path, name: str, kernels: str, settings: Settings
) -> ModelRunner:
    os.environ[ENVIRONMENT_VARIABLE] = kernels
    fields: Settings = {"num_blocks": 64, "num_threads": 1, "max_num_sequences": 16} | settings
    port_file = fields.pop("port_file", None)
    config = WorkerConfig(model=str(folder), **fields)  # pyright: ignore
    spec = RankSpec(name, rank, world_size, timeout_s=20.0)
    if port_file is None:
        return ModelRunner.load(config, spec)
    store = meet_at(str(port_file), rank, 60.0)
    return ModelRunner.load(config, replace(spec, transport=Transport.TORCH), store)


def logits_of(
    rank: int,
    world_size: int,
    folder: Path,
    name: str,
    kernels: str,
    prompts: Sequence[Sequence[int]],
    chunks: Sequence[int],
    settings: Settings | None = None,
) -> list[list[Tensor]]:
    """For each chunk length, the logits of each prompt; nothing on ranks other than the leader."""
    runner = load_rank(rank, world_size, folder, name, kernels, settings or {})
    found = [all_logits(runner, prompts, chunk) for chunk in chunks]
    runner.ranks.messages.barrier()
    runner.close()
    return found


class LedRunner:
    """A leader's runner and executor, as `model_driver.serve` wants them."""

    def __init__(self, runner: ModelRunner, executor: Executor) -> None:
        self.config = runner.config
        self.model_info = runner.model_info
        self.num_blocks = runner.num_blocks
        self.storage = runner.storage
        self.executor = executor

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        return self.executor.execute(output)

    def poll_copies(self) -> tuple[CopyDone, ...]:
        return self.executor.poll_copies()


def answers_to(
    rank: int,
    world_size: int,
    folder: Path,
    name: str,
    kernels: str,
    requests: Sequence[EngineRequest],
    settings: Settings,
    serve_settings: Settings,
) -> dict[tuple[str, int], Answer] | None:
    """Serve the requests, step by step under the leader's scheduler."""
    runner = load_rank(rank, world_size, folder, name, kernels, settings)
    if rank > 0:
        RankLoop(runner).run()
        return None
    executor = make_executor(runner)
    try:
        runner.measure(execute=executor.execute)
        return serve(LedRunner(runner, executor), requests, **serve_settings)  # pyright: ignore
    finally:
        executor.shutdown()


def pool_sizes(
    rank: int, world_size: int, folder: Path, name: str, by_rank: Sequence[Settings]
) -> tuple[int, int, int]:
    """Blocks on the device and the host, and bytes of the pool's tensor."""
    runner = load_rank(rank, world_size, folder, name, "reference", by_rank[rank])
    pool = runner.storage.pool
    runner.close()
    return runner.num_blocks, runner.num_host_blocks, pool.numel() * pool.element_size()


def serve_until_killed(
    rank: int,
    world_size: int,
    folder: Path,
    name: str,
    victim: int,
    requests: Sequence[EngineRequest],
) -> tuple[str, float]:
    """The victim dies in its tenth step; the others → their error, and how long they waited."""
    runner = load_rank(rank, world_size, folder, name, "reference", {})
    execute = runner.execute
    steps = 0
    begin = time.monotonic()

    def count(output: SchedulerOutput) -> ModelRunnerOutput:
        nonlocal steps, begin
        steps += 1
        if rank == victim and steps == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        return execute(output)

    runner.execute = count  # pyright: ignore
    try:
        if rank > 0:
            RankLoop(runner).run()
        else:
            executor = make_executor(runner)
            try:
                serve(LedRunner(runner, executor), requests)  # pyright: ignore
            finally:
                executor.shutdown()
    except GroupError as error:
        return type(error).__name__, time.monotonic() - begin
    return "", 0.0


def load_and_weigh(
    rank: int, world_size: int, folder: Path, name: str, kernels: str
) -> tuple[int, int]:
    """The shard's bytes, and the most that loading took at any moment beyond what was there."""
    samples: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            samples.append(_anonymous_bytes())
            time.sleep(0.0005)

    warm = load_rank(0, 1, folder, "", kernels, {})  # libraries and their threads
    warm.close()
    del warm
    # What the warm-up leaves in the allocator would be taken again unseen, or given back late.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _anonymous_bytes()
    watcher = threading.Thread(target=watch)
    watcher.start()
    runner = load_rank(rank, world_size, folder, name, kernels, {"num_blocks": 1})
    ended.set()
    watcher.join()
    runner.close()
    return runner.partition.weights, max(samples) - before


def _anonymous_bytes() -> int:
    """Memory of the process itself: pages of mapped files belong to the system's cache."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")
