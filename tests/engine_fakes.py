"""What engine tests need around the real scheduler: an executor without a model, a sink, makers."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pagefleet.protos.messages import (
    CacheIdentity,
    EngineRequest,
    SampleStart,
    SamplingParams,
    SequenceDelta,
)
from pagefleet.scheduler.config import SchedulerConfig
from pagefleet.scheduler.output import CopyDone, ModelRunnerOutput, SchedulerOutput
from pagefleet.scheduler.scheduler import Scheduler

WAIT_S = 20.0  # never waited for but by a test that fails
TOKEN = 7
EOS = 2


class FakeExecutor:
    """Answers every sample with TOKEN. `hold` keeps steps from ending, `fail_with` breaks one.

    Copies between the tiers end one look later if `ends_copies`, else when the test says so.
    """

    def __init__(self, on_step: Callable[[SchedulerOutput], None] | None = None) -> None:
        self.outputs: list[SchedulerOutput] = []
        self.fail_with: Exception | None = None
        self.is_shut_down = False
        self.ended_copies: list[CopyDone] = []
        self.ends_copies = True
        self._on_step = on_step
        self._state = threading.Condition()
        self._num_started = 0
        self._num_allowed: int | None = None  # None = any
        self._thread: ThreadPoolExecutor | None = None

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        with self._state:
            self.outputs.append(output)
            self._num_started += 1
            self._state.notify_all()
            assert self._state.wait_for(lambda: self._num_allowed != 0, WAIT_S), "held too long"
            if self._num_allowed is not None:
                self._num_allowed -= 1
        if self.fail_with is not None:
            raise self.fail_with
        if self._on_step is not None:
            self._on_step(output)
        tokens = np.full(len(output.sample_rows), TOKEN, dtype=np.int32)
        done = self.poll_copies()
        if self.ends_copies:
            self.ended_copies += [CopyDone(job.job_id) for job in output.copy_jobs]
        return ModelRunnerOutput(output.step, tokens, copies_done=done, elapsed_s=0.001)

    def launch(self, output: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        self._thread = self._thread or ThreadPoolExecutor(1)
        return self._thread.submit(self.execute, output).result

    def poll_copies(self) -> tuple[CopyDone, ...]:
        done, self.ended_copies = tuple(self.ended_copies), []
        return done

    def shutdown(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        self.is_shut_down = True

    def hold(self, after: int = 0) -> None:
        """So many steps end; the next begins, and ends only after `release`."""
        with self._state:
            self._num_allowed = after
            self._state.notify_all()

    def release(self) -> None:
        with self._state:
            self._num_allowed = None
            self._state.notify_all()

    def wait_for_step(self, number: int) -> None:
        """Wait until so many steps have begun."""
        with self._state:
            assert self._state.wait_for(lambda: self._num_started >= number, WAIT_S)


class Recorder:
    """A sink that keeps what it is given, one list per call."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, list[SequenceDelta]]] = []
        self._state = threading.Condition()

    def __call__(self, step: int, deltas: list[SequenceDelta]) -> None:
        with self._state:
            self.calls.append((step, deltas))
            self._state.notify_all()

    def wait_for(self, condition: Callable[[], object]) -> None:
        with self._state:
            assert self._state.wait_for(condition, WAIT_S), f"never came: {self.calls[-3:]}"

    def deltas(self, key: str) -> list[SequenceDelta]:
        return [d for _, deltas in self.calls for d in deltas if d.request_key == key]

    def ends(self, key: str) -> dict[int, SequenceDelta]:
        """The last delta of each sample, by index."""
        return {d.index: d for d in self.deltas(key) if d.finish_reason is not None}

    def tokens(self, key: str, index: int = 0) -> list[int]:
        """All tokens of a sample, checked to be without gap or repeat."""
        tokens: list[int] = []
        for delta in self.deltas(key):
            if delta.index == index:
                assert delta.first_position == len(tokens), delta
                tokens += delta.token_ids
        return tokens


def make_scheduler(num_blocks: int = 64, **fields: object) -> Scheduler:
    settings = {"block_size": 4, "max_context": 256, "max_num_sequences": 8, **fields}
    config = SchedulerConfig(num_blocks, **settings)
    identity = CacheIdentity("fake", 0, "float32", config.block_size)
    return Scheduler(config, identity, (EOS,))


def make_request(
    key: str,
    num_prompt: int = 8,
    max_tokens: int | None = 4,
    n: int = 1,
    prompt: Iterable[int] | None = None,
    deadline_s: float | None = None,
    **sampling: object,
) -> EngineRequest:
    """A greedy request; unlike prompts unless `prompt` says otherwise."""
    first = sum(key.encode())
    token_ids = tuple(prompt or (10 + (first + i) % 90 for i in range(num_prompt)))
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=1, n=n, **sampling)
    samples = tuple(SampleStart(index) for index in range(n))
    return EngineRequest(key, token_ids, params, samples, deadline_s=deadline_s)


def assert_at_rest(scheduler: Scheduler) -> None:
    """No request, no sequence, every block clean or cached-idle, and the books agree."""
    scheduler.check_integrity()
    stats = scheduler.stats()
    for tier in (stats.device, stats.host):
        assert (tier.referenced, tier.fenced) == (0, 0), tier
    assert (stats.num_waiting, stats.num_running, stats.leases) == (0, 0, ())
    assert not scheduler.has_unfinished()
    assert not scheduler._requests
    assert not scheduler._sequences
