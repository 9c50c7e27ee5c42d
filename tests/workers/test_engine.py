"""The engine's loop around the real scheduler, with an executor that has no model."""

import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from engine_fakes import (
    TOKEN,
    WAIT_S,
    FakeExecutor,
    Recorder,
    assert_at_rest,
    make_request,
    make_scheduler,
)

from pagefleet.protos.errors import InvalidArgument, Unavailable
from pagefleet.protos.messages import EngineRequest, FinishReason, SequenceDelta
from pagefleet.scheduler.output import CopyDone, CopyJob, CopyKind, SchedulerOutput
from pagefleet.scheduler.scheduler import Scheduler
from pagefleet.workers.engine import Engine
from pagefleet.workers.json_log import JsonFormatter

MakeEngine = Callable[..., Engine]


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def make_engine(request: pytest.FixtureRequest) -> Iterator[MakeEngine]:
    """Engines that are started, and shut down and checked at the end."""
    engines: list[Engine] = []

    def make(scheduler: Scheduler, executor: FakeExecutor, **options: object) -> Engine:
        engine = Engine(scheduler, executor, overlap=request.param, **options)
        engines.append(engine)
        engine.start()
        return engine

    yield make
    for engine in engines:
        engine.shutdown(WAIT_S)
    left = [thread.name for thread in threading.enumerate() if "pagefleet-" in thread.name]
    assert not left


def test_serves_a_request_to_its_end(make_engine: MakeEngine) -> None:
    scheduler, recorder = make_scheduler(), Recorder()
    engine = make_engine(scheduler, FakeExecutor())
    engine.submit(make_request("a", num_prompt=8, max_tokens=5, n=2), recorder)
    recorder.wait_for(lambda: len(recorder.ends("a")) == 2)
    for index, end in recorder.ends("a").items():
        assert recorder.tokens("a", index) == [TOKEN] * 5
        assert end.finish_reason is FinishReason.LENGTH
        assert end.usage.prompt_tokens == 8
        assert end.usage.completion_tokens == 5
    assert engine.wait_until_empty(WAIT_S)
    assert engine.num_requests == 0
    engine.shutdown()
    assert_at_rest(scheduler)


def test_a_sink_gets_all_its_deltas_of_a_step_in_one_call(make_engine: MakeEngine) -> None:
    mine, other = Recorder(), Recorder()
    executor = FakeExecutor()
    executor.hold()
    engine = make_engine(make_scheduler(), executor)
    engine.submit(make_request("a"), mine)
    engine.submit(make_request("b"), mine)
    engine.submit(make_request("c"), other)
    executor.release()
    mine.wait_for(lambda: mine.ends("a") and mine.ends("b"))
    other.wait_for(lambda: other.ends("c"))
    steps = [step for step, _ in mine.calls]
    assert steps == sorted(set(steps)), "one call a step"
    assert any(len(deltas) == 2 for _, deltas in mine.calls)
    assert {d.request_key for _, deltas in other.calls for d in deltas} == {"c"}


@pytest.mark.parametrize("point", ["queued", "prefill", "last chunk", "decode"])
def test_nothing_follows_a_cancel(make_engine: MakeEngine, point: str) -> None:
    """E19, E44: whatever the request is doing, it says no more and its blocks come back."""
    executor, recorder, neighbour = FakeExecutor(), Recorder(), Recorder()
    scheduler = make_scheduler(max_num_sequences=1 if point == "queued" else 8, prefill_chunk=8)
    engine = make_engine(scheduler, executor)
    if point == "queued":
        engine.submit(make_request("before", max_tokens=100), neighbour)
        neighbour.wait_for(lambda: neighbour.calls)
    executor.hold()
    num_begun = len(executor.outputs)
    engine.submit(make_request("a", num_prompt=24, max_tokens=50), recorder)
    num_steps = {"queued": 1, "prefill": 1, "last chunk": 3, "decode": 6}[point]
    executor.hold(after=num_steps - 1)
    executor.wait_for_step(num_begun + num_steps)
    engine.cancel("a")
    num_said = len(recorder.deltas("a"))
    executor.release()
    engine.cancel("before")
    assert engine.wait_until_empty(WAIT_S)
    engine.call(Scheduler.stats).result(WAIT_S)
    assert len(recorder.deltas("a")) == num_said
    if point != "decode":
        assert num_said == 0
    engine.shutdown()
    assert_at_rest(scheduler)


def test_a_cancelled_request_frees_its_slot_for_the_next(make_engine: MakeEngine) -> None:
    """E44: the slot of a reader that has gone is free within two steps."""
    executor, gone, here = FakeExecutor(), Recorder(), Recorder()
    engine = make_engine(make_scheduler(max_num_sequences=1), executor)
    engine.submit(make_request("gone", max_tokens=200), gone)
    gone.wait_for(lambda: gone.calls)
    engine.submit(make_request("here", max_tokens=2), here)
    engine.cancel("gone")
    num_steps = len(executor.outputs)
    here.wait_for(lambda: here.ends("here"))
    assert len(executor.outputs) <= num_steps + 2 + 3, "two to stop, three for the next"


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_a_thousand_random_cancels_leave_nothing_behind(
    make_engine: MakeEngine, num_host_blocks: int
) -> None:
    """E43 and more: n up to 4, cancelled anywhere between the queue and the end."""
    rng = random.Random(int(os.environ.get("FUZZ_SEED", "5")))
    recorder = Recorder()
    scheduler = make_scheduler(48, prefill_chunk=7, num_host_blocks=num_host_blocks)
    engine = make_engine(scheduler, FakeExecutor())
    living: list[str] = []
    for number in range(1000):
        key = f"r{number}"
        request = make_request(key, rng.randint(1, 30), rng.randint(0, 20), rng.choice((1, 1, 4)))
        engine.submit(request, recorder)
        living.append(key)
        while len(living) > rng.randint(0, 12):
            victim = living.pop(rng.randrange(len(living)))
            engine.cancel(victim)
            num_said = len(recorder.deltas(victim)) if number % 50 == 0 else None
            if num_said is not None:
                engine.call(Scheduler.check_integrity).result(WAIT_S)
                assert len(recorder.deltas(victim)) == num_said
    for key in living:
        engine.cancel(key)
    assert engine.wait_until_empty(WAIT_S)
    while _num_in_copies(engine):
        pass  # until the last copy between the tiers has ended
    assert engine.failure is None
    engine.shutdown()
    assert_at_rest(scheduler)


def test_a_thousand_disconnects_of_four_samples_each(make_engine: MakeEngine) -> None:
    """E43: no parent record survives its samples."""
    scheduler, recorder = make_scheduler(num_blocks=64), Recorder()
    engine = make_engine(scheduler, FakeExecutor())
    for number in range(1000):
        engine.submit(make_request(f"r{number}", max_tokens=50, n=4), recorder)
        if number % 3 == 0:
            recorder.wait_for(lambda key=f"r{number}": recorder.calls and recorder.calls[-1])
        engine.cancel(f"r{number}")
    engine.call(Scheduler.check_integrity).result(WAIT_S)
    assert engine.num_requests == 0
    engine.shutdown()
    assert_at_rest(scheduler)


def test_an_expired_request_never_runs_and_says_so(make_engine: MakeEngine) -> None:
    """E52: one slot, a step takes 30 ms, fifty requests wait with 100 ms left."""
    now = [0.0]

    def pass_time(output: SchedulerOutput) -> None:
        now[0] += 0.030

    executor, recorder = FakeExecutor(pass_time), Recorder()
    executor.hold()
    scheduler = make_scheduler(max_num_sequences=1, enable_prefix_caching=False)
    engine = make_engine(scheduler, executor, clock=lambda: now[0])
    engine.submit(make_request("first", max_tokens=20), recorder)
    keys = [f"r{number}" for number in range(50)]
    for key in keys:
        engine.submit(make_request(key, deadline_s=0.100), recorder)
    executor.release()
    recorder.wait_for(lambda: all(recorder.ends(key) for key in ["first", *keys]))
    for key in keys:
        (end,) = recorder.ends(key).values()
        assert end.finish_reason is FinishReason.DEADLINE
        assert recorder.tokens(key) == []
    assert recorder.tokens("first") == [TOKEN] * 20
    num_prefilled = sum(len(output.new_rows) for output in executor.outputs)
    assert num_prefilled == 1
    assert now[0] < 1.0, "nobody waited for those that had expired"


def test_a_refused_request_is_one_error(make_engine: MakeEngine) -> None:
    recorder = Recorder()
    engine = make_engine(make_scheduler(num_blocks=8), FakeExecutor())
    engine.submit(make_request("huge", num_prompt=100, n=2), recorder)
    engine.submit(make_request("good"), recorder)
    recorder.wait_for(lambda: recorder.ends("good") and len(recorder.ends("huge")) == 2)
    for end in recorder.ends("huge").values():
        assert end.finish_reason is FinishReason.ERROR
        assert end.error_class == "InvalidArgument"
        assert end.error.startswith("prompt: ")
    assert recorder.ends("good")[0].finish_reason is FinishReason.LENGTH


def test_a_lease_the_leader_refuses_is_overload(make_engine: MakeEngine) -> None:
    """The gateway tells from the class that it should ask for another lease."""
    recorder = Recorder()
    engine = make_engine(make_scheduler(num_blocks=8), FakeExecutor())
    first = make_request("a", num_prompt=24, max_tokens=2)
    engine.submit(first, recorder)
    asked = EngineRequest("b", first.prompt_token_ids, first.sampling, first.samples, 9, 8)
    engine.submit(asked, recorder)
    recorder.wait_for(lambda: recorder.ends("a") and recorder.ends("b"))
    end = recorder.ends("b")[0]
    assert end.finish_reason is FinishReason.LENGTH or end.error_class == "Overloaded"


def test_a_request_that_trips_over_a_bug_does_not_take_the_loop(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, recorder = make_scheduler(), Recorder()
    add = scheduler.add_request

    def stumble(request: EngineRequest, now: float) -> None:
        add(request, now)
        if request.request_key == "odd":
            raise OverflowError("int too large")

    monkeypatch.setattr(scheduler, "add_request", stumble)
    engine = make_engine(scheduler, FakeExecutor())
    engine.submit(replace(make_request("odd"), request_id="mine"), recorder)
    engine.submit(make_request("good"), recorder)
    recorder.wait_for(lambda: recorder.ends("good"))
    assert recorder.ends("odd")[0].error_class == "InternalError"
    assert recorder.tokens("odd") == []
    assert engine.failure is None
    line = json.loads(JsonFormatter().format(caplog.records[-1]))
    assert (line["request_id"], line["level"]) == ("mine", "error")
    assert "OverflowError" in line["exception"]


def test_a_step_that_breaks_ends_everyone_and_the_engine(make_engine: MakeEngine) -> None:
    executor, recorder = FakeExecutor(), Recorder()
    engine = make_engine(make_scheduler(max_num_sequences=1), executor)
    engine.submit(make_request("running", max_tokens=200), recorder)
    recorder.wait_for(lambda: recorder.tokens("running"))
    engine.submit(make_request("waiting", n=2), recorder)
    executor.fail_with = RuntimeError("device lost")
    recorder.wait_for(lambda: recorder.ends("running") and len(recorder.ends("waiting")) == 2)
    engine.join(WAIT_S)
    for key in ("running", "waiting"):
        for end in recorder.ends(key).values():
            assert end.error_class == "Unavailable", "the gateway resumes it elsewhere"
    assert recorder.ends("running")[0].first_position == len(recorder.tokens("running"))
    assert isinstance(engine.failure, RuntimeError)
    assert executor.is_shut_down
    assert engine.num_requests == 0
    with pytest.raises(Unavailable):
        engine.submit(make_request("late"), recorder)
    with pytest.raises(Unavailable):
        engine.call(Scheduler.stats).result(WAIT_S)


def test_shutdown_with_work_queued_answers_everyone(make_engine: MakeEngine) -> None:
    scheduler, executor, recorder = make_scheduler(max_num_sequences=1), FakeExecutor(), Recorder()
    engine = make_engine(scheduler, executor)
    executor.hold()
    keys = [f"r{number}" for number in range(5)]
    for key in keys:
        engine.submit(make_request(key, max_tokens=200), recorder)
    executor.wait_for_step(1)
    engine.stop_accepting("going")
    stopper = threading.Thread(target=engine.shutdown)
    stopper.start()
    executor.release()
    stopper.join(WAIT_S)
    for key in keys:
        assert recorder.ends(key)[0].error_class == "Unavailable"
    assert engine.failure is None
    assert executor.is_shut_down
    assert_at_rest(scheduler)


def test_shutdown_of_an_engine_that_never_ran() -> None:
    executor, recorder = FakeExecutor(), Recorder()
    engine = Engine(make_scheduler(), executor)
    engine.submit(make_request("a"), recorder)
    asked = engine.call(Scheduler.stats)
    engine.shutdown()
    assert recorder.ends("a")[0].error_class == "Unavailable"
    assert isinstance(asked.exception(0), Unavailable)
    assert executor.is_shut_down


def test_draining_lets_requests_finish_and_takes_no_more(make_engine: MakeEngine) -> None:
    executor, recorder = FakeExecutor(), Recorder()
    executor.hold()
    engine = make_engine(make_scheduler(), executor)
    engine.submit(make_request("a", max_tokens=3), recorder)
    engine.stop_accepting("the replica is draining")
    with pytest.raises(Unavailable, match="draining"):
        engine.submit(make_request("b"), recorder)
    assert not engine.wait_until_empty(0.0)
    executor.release()
    assert engine.wait_until_empty(WAIT_S)
    assert recorder.tokens("a") == [TOKEN] * 3


def test_a_reader_ends_a_sample_by_its_own_judgement(make_engine: MakeEngine) -> None:
    scheduler, executor, recorder = make_scheduler(), FakeExecutor(), Recorder()
    engine = make_engine(scheduler, executor)
    engine.submit(make_request("a", max_tokens=200, n=2), recorder)
    recorder.wait_for(lambda: len(recorder.tokens("a", 0)) >= 5)
    engine.finish("a", 0, 4)
    engine.finish("a", 7, 4)
    engine.finish("nobody", 0, 4)
    recorder.wait_for(lambda: len(recorder.ends("a")) == 2)
    first, second = (recorder.ends("a")[index] for index in (0, 1))
    assert first.finish_reason is FinishReason.STOP
    assert first.usage.completion_tokens == 4
    assert not first.token_ids
    assert second.finish_reason is FinishReason.LENGTH
    assert len(recorder.tokens("a", 1)) == 200
    engine.shutdown()
    assert_at_rest(scheduler)


def test_a_broken_sink_loses_its_own_requests_only(make_engine: MakeEngine) -> None:
    recorder = Recorder()

    def broken(step: int, deltas: list[SequenceDelta]) -> None:
        raise RuntimeError("this reader is broken")

    scheduler = make_scheduler()
    engine = make_engine(scheduler, FakeExecutor())
    engine.submit(make_request("lost", max_tokens=100), broken)
    engine.submit(make_request("also lost", max_tokens=100), broken)
    engine.submit(make_request("kept", max_tokens=10), recorder)
    recorder.wait_for(lambda: recorder.ends("kept"))
    assert engine.wait_until_empty(WAIT_S)
    assert recorder.tokens("kept") == [TOKEN] * 10
    engine.shutdown()
    assert_at_rest(scheduler)


def test_a_sink_may_cancel_what_it_is_told_of(make_engine: MakeEngine) -> None:
    seen: list[SequenceDelta] = []

    def sink(step: int, deltas: list[SequenceDelta]) -> None:
        seen.extend(deltas)
        engine.cancel("a")

    engine = make_engine(make_scheduler(), FakeExecutor())
    engine.submit(make_request("a", max_tokens=100), sink)
    assert engine.wait_until_empty(WAIT_S)
    assert len(seen) == 1


def test_keys_in_use_and_empty_requests_are_refused_at_once(make_engine: MakeEngine) -> None:
    executor, recorder = FakeExecutor(), Recorder()
    executor.hold()
    engine = make_engine(make_scheduler(), executor)
    request = make_request("a")
    engine.submit(request, recorder)
    with pytest.raises(InvalidArgument, match="request_key"):
        engine.submit(request, recorder)
    for samples in ((), request.samples * 2):
        with pytest.raises(InvalidArgument, match="samples"):
            engine.submit(
                EngineRequest("b", request.prompt_token_ids, request.sampling, samples), recorder
            )
    assert engine.num_requests == 1
    executor.release()


def test_calls_run_between_steps_and_give_errors_back(make_engine: MakeEngine) -> None:
    def fail(scheduler: Scheduler) -> None:
        raise LookupError("not mine")

    engine = make_engine(make_scheduler(num_blocks=9), FakeExecutor())
    assert engine.call(Scheduler.stats).result(WAIT_S).device.clean == 9
    assert isinstance(engine.call(fail).exception(WAIT_S), LookupError)
    assert engine.call(Scheduler.reset_prefix_cache).result(WAIT_S) == 0


def test_the_pulse_moves_while_idle_and_stops_with_work_that_never_runs(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, looks = make_scheduler(), threading.Semaphore(0)
    engine = make_engine(scheduler, FakeExecutor(), idle_tick_s=0.005)
    ticked = threading.Event()
    before = engine.steps_done
    monkeypatch.setattr(engine, "_pulse", _after(engine._pulse, ticked.set))
    assert ticked.wait(WAIT_S)
    assert engine.steps_done > before

    def stuck(now: float) -> None:
        looks.release()

    monkeypatch.setattr(scheduler, "schedule", stuck)
    engine.submit(make_request("a"), Recorder())
    engine.call(Scheduler.stats).result(WAIT_S)
    before = engine.steps_done
    for _ in range(30):
        assert looks.acquire(timeout=WAIT_S)
    assert engine.steps_done == before


def _num_in_copies(engine: Engine) -> int:
    """Blocks that a copy or a step may still touch."""
    stats = engine.call(Scheduler.stats).result(WAIT_S)
    return sum(tier.referenced + tier.fenced for tier in (stats.device, stats.host))


def _after(function: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        function()
        then()

    return both


class CopyingScheduler:
    """Gives out one copy job and nothing else."""

    def __init__(self) -> None:
        self.imports = make_scheduler().imports  # none are open
        self.done: list[CopyDone] = []
        self.heard = threading.Event()
        self._has_job = True

    def schedule(self, now: float) -> SchedulerOutput | None:
        if not self._has_job:
            return None
        self._has_job = False
        blocks = make_array(0)
        return SchedulerOutput(1, copy_jobs=(CopyJob(4, CopyKind.STORE, blocks, blocks),))

    def update(self, output: SchedulerOutput, result: object, now: float) -> None:
        pass

    def copies_done(self, done: tuple[CopyDone, ...]) -> None:
        self.done += done
        self.heard.set()

    def take_deltas(self) -> list[SequenceDelta]:
        return []

    def has_unfinished(self) -> bool:
        return False


def make_array(*values: int) -> object:
    import numpy as np

    return np.array(values, dtype=np.int32)


def test_copies_that_end_while_no_step_runs_are_heard_of(make_engine: MakeEngine) -> None:
    scheduler, executor = CopyingScheduler(), FakeExecutor()
    executor.ends_copies = False
    make_engine(scheduler, executor, idle_tick_s=1000.0)
    executor.wait_for_step(1)
    executor.ended_copies.append(CopyDone(4))
    assert scheduler.heard.wait(WAIT_S)
    assert scheduler.done == [CopyDone(4)]


def test_a_rank_lost_while_idle_ends_the_engine(make_engine: MakeEngine) -> None:
    class LosesRank(FakeExecutor):
        is_lost = False

        def poll_copies(self) -> tuple[CopyDone, ...]:
            if self.is_lost:
                raise ConnectionError("rank 1 is gone")
            return ()

    executor = LosesRank()
    engine = make_engine(make_scheduler(), executor, idle_tick_s=0.001)
    executor.is_lost = True
    engine.join(WAIT_S)
    assert isinstance(engine.failure, ConnectionError)


def test_a_copy_that_never_ends_is_a_broken_device(make_engine: MakeEngine) -> None:
    """E18: the replica is rebuilt; its blocks are not handed out again meanwhile."""
    now = [0.0]
    executor = FakeExecutor()
    executor.ends_copies = False
    engine = make_engine(CopyingScheduler(), executor, clock=lambda: now[0])
    executor.wait_for_step(1)
    now[0] = 11.0
    engine.join(WAIT_S)
    assert isinstance(engine.failure, TimeoutError)
