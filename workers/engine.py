"""The engine loop of one replica: commands in, steps, deltas out, all on one thread.

Knows when things happen; what happens is the scheduler's to decide and the executor's to do.
Knows no text, no sockets, no Ray.

    any thread:     submit / cancel / finish / call ──► command queue
    engine thread:  commands ► schedule ► execute ► update ► one delivery per sink, again
    with overlap:   commands ► schedule N+1 ► (step N ends) ► update N ► deliver, again
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ..protos.errors import InternalError, InvalidArgument, PagefleetError, Unavailable
from ..protos.messages import EngineRequest, FinishReason, SequenceDelta
from ..scheduler.output import CopyDone, ModelRunnerOutput, SchedulerOutput
from ..scheduler.prefix_imports import ImportCounts, ImportOrder
from ..scheduler.scheduler import Scheduler
from .executor import Executor
from .live_request import DeltaSink, LiveRequest
from .step_times import StepTimes

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S = 0.001  # between looks at copies in flight while no step can run
_NATURAL_ENDS = (FinishReason.STOP, FinishReason.LENGTH)
_COPY_TIMEOUT_S = 10.0  # a copy within this host that takes longer means a broken device


@dataclass(frozen=True, slots=True)
class _Command:
    """Something to do between two steps; `refuse` is called instead once the loop has ended."""

    run: Callable[[], object]
    refuse: Callable[[Unavailable], None] | None = None


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    output: SchedulerOutput
    result: Callable[[], ModelRunnerOutput]  # runs the step, or waits for what does


class Engine:
    """One scheduler and one executor, driven by one thread.

    Args:
        overlap: schedule step N+1 while step N runs.
        idle_tick_s: how often `steps_done` moves while there is nothing to do.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
        overlap: bool = False,
        idle_tick_s: float = 1.0,
        step_times: StepTimes | None = None,
    ) -> None:
        self.step_times = step_times or StepTimes()
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._idle_tick_s = idle_tick_s
        self._overlaps = overlap
        self._in_flight: deque[_StepInFlight] = deque()
        self._copies: dict[int, float] = {}  # job id → when it was handed out, oldest first
        self._steps_done = 0
        self._last_pulse = clock()
        self._on_change: Callable[[], None] | None = None
        self._on_import: Callable[[ImportOrder], None] | None = None
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="pagefleet-engine", daemon=True)
        # Guards what follows. Held while sinks are called, so that nothing is delivered for a
        # request once `cancel` has returned; reentrant, so that a sink may cancel.
        self._state = threading.Condition(threading.RLock())
        self._commands: deque[_Command] = deque()
        self._requests: dict[str, LiveRequest] = {}
        self._output_lengths: list[int] = []  # of samples that ended by themselves
        self._refusal: Unavailable | None = None  # why nothing more is accepted
        self._stopping = False
        self._ended = False

    # -- any thread --------------------------------------------------------------------------

    @property
    def steps_done(self) -> int:
        """Steps, and seconds of idleness: a replica whose count does not move is stuck."""
        return self._steps_done

    @property
    def failure(self) -> Exception | None:
        """What ended the loop, if it was not `shutdown`. The replica must then be rebuilt."""
        return self._failure

    @property
    def num_requests(self) -> int:
        """Requests with a sample that has not ended."""
        return len(self._requests)

    @property
    def import_counts(self) -> ImportCounts:
        """What came of prefixes that were fetched from other replicas."""
        return self._scheduler.imports.counts

    def start(
        self,
        on_change: Callable[[], None] | None = None,
        on_import: Callable[[ImportOrder], None] | None = None,
    ) -> None:
        """Begin to step. Called on the engine thread: `on_change` whenever stats may differ,
        `on_import` for what is to be fetched from another replica."""
        self._on_change = on_change
        self._on_import = on_import
        self._thread.start()

    def submit(self, request: EngineRequest, sink: DeltaSink) -> None:
        """Queue a request. What the scheduler refuses ends with an ERROR delta per sample.

        Raises InvalidArgument for a key in use, Unavailable when no more requests are taken.
        """
        live = LiveRequest(request, sink)
        if not request.samples or len(live.num_sent) < len(request.samples):
            raise InvalidArgument("samples", "a request needs samples of different indices")
        with self._state:
            if self._refusal is not None:
                raise self._refusal
            if request.request_key in self._requests:
                raise InvalidArgument("request_key", f"{request.request_key!r} is in use")
            self._requests[request.request_key] = live
            self._post(_Command(partial(self._add, live, self._clock())))

    def cancel(self, request_key: str) -> None:
        """Stop a request: nothing is delivered for it once this returns. Unknown keys are fine."""
        with self._state:
            if self._requests.pop(request_key, None) is not None:
                self._post(_Command(partial(self._scheduler.abort_request, request_key)))

    def finish(self, request_key: str, index: int, num_tokens: int) -> None:
        """End one sample by its reader's judgement: it keeps `num_tokens` output tokens."""
        with self._state:
            self._post(_Command(partial(self._finish, request_key, index, num_tokens)))

    def call(self, function: Callable[[Scheduler], T]) -> Future[T]:
        """Run `function` between two steps."""
        future: Future[T] = Future()
        run = partial(self._run_call, function, future)
        with self._state:
            self._post(_Command(run, partial(_refuse_call, future)))
        return future

    def stop_accepting(self, reason: str) -> None:
        """Take no more requests; those that are here go on."""
        with self._state:
            self._refusal = self._refusal or Unavailable(reason)

    def wait_until_empty(self, timeout_s: float | None = None) -> bool:
        """Wait for the last request to end; False if some are left after `timeout_s`."""
        with self._state:
            return self._state.wait_for(lambda: not self._requests, timeout_s)

    def give_up(self, error: Unavailable) -> None:
        """End every request with `error`; its gateway goes on with it elsewhere."""
        with self._state:
            self._post(_Command(partial(self._give_up, error)))

    def take_output_lengths(self) -> tuple[int, ...]:
        """Tokens of each sample that ended by itself since the last call."""
        with self._state:
            lengths, self._output_lengths = tuple(self._output_lengths), []
        return lengths

    def shutdown(self, timeout_s: float | None = None) -> None:
        """End the loop after the step it is in; what is unfinished ends as Unavailable."""
        self.stop_accepting("the engine is shutting down")
        with self._state:
            self._stopping = True
            self._state.notify_all()
        if self._thread.ident is None:
            self._end(Unavailable("the engine never ran"))
            self._release()
        else:
            self.join(timeout_s)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the loop to end, by `shutdown` or by a failure."""
        self._thread.join(timeout_s)

    def _post(self, command: _Command) -> None:
        """Needs the lock."""
        if not self._ended:
            self._commands.append(command)
            self._state.notify_all()
        elif command.refuse is not None:
            command.refuse(Unavailable("the engine has ended"))

    # -- engine thread: the loop -------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                did_commands = self._run_commands()
                did_step = self._step()
                if (did_commands or did_step) and self._on_change is not None:
                    self._on_change()
                if not did_step:
                    self._wait()
            self._finish_steps(0)
            self._abort_all()
            self._end(Unavailable("the engine was shut down"))
        except Exception as error:
            # The thread's edge. Whatever broke, the pool can no longer be trusted: everyone who
            # waits is told, and the replica is rebuilt.
            logger.exception("the engine failed")
            self._failure = error
            self._end(Unavailable(f"the engine failed: {type(error).__name__}"))
        finally:
            self._release()

    def _run_commands(self) -> bool:
        num_commands = len(self._commands)  # what comes meanwhile waits for the next step
        for _ in range(num_commands):
            self._commands.popleft().run()
        return num_commands > 0

    def _step(self) -> bool:
        """Schedule a step and end the one before it; False if there was neither."""
        for order in self._scheduler.imports.take_orders():
            self._fetch(order)
        output = self._scheduler.schedule(self._clock())
        if output is not None:
            self._launch(output)
        overlaps = output is not None and self._overlaps
        num_ended = self._finish_steps(1 if overlaps else 0)
        if output is None:
            self._poll_executor()
        self._deliver(self._scheduler.take_deltas())
        return output is not None or num_ended > 0

    def _fetch(self, order: ImportOrder) -> None:
        if self._on_import is None:  # nobody to ask
            self._scheduler.imports.fail(order.import_id)
        else:
            self._on_import(order)

    def _launch(self, output: SchedulerOutput) -> None:
        now = self._clock()
        for job in output.copy_jobs:
            self._copies[job.job_id] = now
        if self._overlaps:
            result = self._executor.launch(output)
        else:
            result = partial(self._executor.execute, output)
        self._in_flight.append(_StepInFlight(output, result))

    def _finish_steps(self, num_left: int) -> int:
        """Wait for steps, oldest first, until `num_left` are in flight."""
        num_ended = 0
        while len(self._in_flight) > num_left:
            step = self._in_flight.popleft()
            result = step.result()
            self._forget_copies(result.copies_done)
            self._scheduler.update(step.output, result, self._clock())
            self.step_times.add(step.output, result.elapsed_s)
            self._pulse()
            num_ended += 1
        return num_ended

    def _wait(self) -> None:
        """Sleep until there is a command or something to look at."""
        busy = bool(self._copies) or self._scheduler.has_unfinished()
        until_pulse_s = self._last_pulse + self._idle_tick_s - self._clock()
        with self._state:
            if not self._commands and not self._stopping:
                self._state.wait(_POLL_S if busy else max(until_pulse_s, 0.0))
        # Work that waits and never runs must look stuck, so only idleness counts as a pulse.
        if not busy and self._clock() - self._last_pulse >= self._idle_tick_s:
            self._pulse()

    def _pulse(self) -> None:
        self._steps_done += 1
        self._last_pulse = self._clock()

    # -- engine thread: copies between the tiers ---------------------------------------------

    def _poll_executor(self) -> None:
        """While no step runs, hear of copies that end, and of ranks that are lost (it raises)."""
        done = self._executor.poll_copies()
        self._forget_copies(done)
        if done:
            self._scheduler.copies_done(done)
        oldest = next(iter(self._copies.values()), None)
        if oldest is not None and self._clock() - oldest > _COPY_TIMEOUT_S:
            raise TimeoutError(f"a copy between the tiers took over {_COPY_TIMEOUT_S} s")

    def _forget_copies(self, done: Iterable[CopyDone]) -> None:
        for copy in done:
            self._copies.pop(copy.job_id, None)

    # -- engine thread: commands -------------------------------------------------------------

    def _add(self, live: LiveRequest, submitted_at: float) -> None:
        key = live.request.request_key
        if self._requests.get(key) is not live:
            return  # cancelled before it was looked at
        try:
            # its deadline counts from `submit`, not from the end of the step that ran then
            self._scheduler.add_request(live.request, submitted_at)
        except PagefleetError as error:
            self._deliver(live.error_deltas(error))
        except Exception:
            # The edge between a request and its neighbours: one that trips over a bug of ours
            # is one error, logged, and must not take the loop with it.
            fields = {"request_key": key, "request_id": live.request.request_id}
            logger.exception("a request could not be added", extra={"fields": fields})
            self._scheduler.abort_request(key)
            self._deliver(live.error_deltas(InternalError("the engine could not take the request")))

    def _finish(self, request_key: str, index: int, num_tokens: int) -> None:
        live = self._requests.get(request_key)
        if live is None or index not in live.num_sent:
            return  # it ended by itself, or was cancelled, while the command was on its way
        try:
            self._scheduler.finish_sequence(request_key, index, num_tokens, self._clock())
        except PagefleetError as error:
            self._scheduler.abort_request(request_key)
            self._deliver(live.error_deltas(error))

    def _give_up(self, error: Unavailable) -> None:
        with self._state:
            given_up = list(self._requests.values())
        for live in given_up:
            self._scheduler.abort_request(live.request.request_key)
        self._deliver([delta for live in given_up for delta in live.error_deltas(error)])

    def _run_call(self, function: Callable[[Scheduler], T], future: Future[T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function(self._scheduler))
        except Exception as error:  # belongs to the caller, who gets it
            future.set_exception(error)

    # -- engine thread: deltas ---------------------------------------------------------------

    def _deliver(self, deltas: Iterable[SequenceDelta]) -> None:
        """Hand each sink its deltas, but none of requests cancelled meanwhile."""
        groups: dict[DeltaSink, list[SequenceDelta]] = {}
        with self._state:
            for delta in deltas:
                live = self._requests.get(delta.request_key)
                if live is None or delta.index not in live.num_sent:
                    continue
                live.note(delta)
                if delta.finish_reason in _NATURAL_ENDS and delta.usage is not None:
                    self._output_lengths.append(delta.usage.completion_tokens)
                if not live.num_sent:
                    del self._requests[delta.request_key]
                groups.setdefault(live.sink, []).append(delta)
            for sink, group in groups.items():
                self._call_sink(sink, group)
            if groups and not self._requests:
                self._state.notify_all()

    def _call_sink(self, sink: DeltaSink, deltas: list[SequenceDelta]) -> None:
        try:
            sink(self._steps_done, deltas)
        except Exception:
            # The edge between readers: one whose sink breaks loses its own requests only.
            lost = [live.request for live in self._requests.values() if live.sink == sink]
            fields = {"request_ids": [request.request_id for request in lost]}
            logger.exception("a sink failed; its requests are cancelled", extra={"fields": fields})
            for request in lost:
                self.cancel(request.request_key)

    # -- engine thread: the end --------------------------------------------------------------

    def _abort_all(self) -> None:
        """Give every block back, so that the scheduler is left as a new one."""
        self._run_commands()
        for request_key in list(self._requests):
            self._scheduler.abort_request(request_key)

    def _end(self, error: Unavailable) -> None:
        """Tell everyone who still waits for something."""
        with self._state:
            self._refusal = error
            self._ended = True
            commands, self._commands = self._commands, deque()
            unfinished = self._requests.values()
            self._deliver([delta for live in unfinished for delta in live.error_deltas(error)])
        for command in commands:
            if command.refuse is not None:
                command.refuse(error)
        if self._on_change is not None:
            self._on_change()

    def _release(self) -> None:
        self._executor.shutdown()


def _refuse_call(future: Future[T], error: Unavailable) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
