"""What a leader reports and when, with a fake controller and a clock that stands still."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import pytest
from engine_fakes import TOKEN, make_request, make_scheduler

from pagefleet.protos.errors import Unavailable
from pagefleet.protos.messages import (
    ModelCard,
    ReplicaInfo,
    ReplicaReport,
    ReportReply,
)
from pagefleet.scheduler.output import ModelRunnerOutput
from pagefleet.scheduler.scheduler import Scheduler
from pagefleet.workers.controller_link import ControllerUnreachable
from pagefleet.workers.reporter import Reporter
from pagefleet.workers.step_times import StepTimes

T = TypeVar("T")


class FakeEngine:
    """A scheduler that the test steps by hand; calls run at once, or later if `busy`."""

    def __init__(self) -> None:
        self.scheduler = make_scheduler()
        self.steps_done = 0
        self.step_times = StepTimes(0.02)
        self.is_busy = False
        self.has_ended = False
        self.output_lengths: tuple[int, ...] = ()
        self._waiting: list[Callable[[], None]] = []

    def call(self, function: Callable[[Scheduler], T]) -> Future[T]:
        future: Future[T] = Future()
        if self.has_ended:
            future.set_exception(Unavailable("the engine has ended"))
        elif self.is_busy:
            self._waiting.append(lambda: future.set_result(function(self.scheduler)))
        else:
            future.set_result(function(self.scheduler))
        return future

    def take_output_lengths(self) -> tuple[int, ...]:
        lengths, self.output_lengths = self.output_lengths, ()
        return lengths

    def end_step(self) -> None:
        self.is_busy = False
        for call in self._waiting:
            call()
        self._waiting.clear()

    def run(self, key: str, **request: object) -> None:
        """Serve a request to its end."""
        self.scheduler.add_request(make_request(key, **request), 0.0)
        while (output := self.scheduler.schedule(0.0)) is not None:
            tokens = np.full(len(output.sample_rows), TOKEN, dtype=np.int32)
            self.scheduler.update(output, ModelRunnerOutput(output.step, tokens), 0.0)
            self.steps_done += 1


class FakeController:
    """Keeps what it hears, mirrors the resident hashes as the real one does, and can be away."""

    def __init__(self) -> None:
        self.heard: list[ReplicaReport | ReplicaInfo] = []
        self.reply = ReportReply()
        self.is_away = False
        self.loses_replies = False
        self.resident: set[bytes] = set()
        self.last_sequence: int | None = None
        self.finished_leases: list[int] = []

    async def register_replica(self, info: ReplicaInfo, card: ModelCard) -> ReportReply:
        if self.is_away:
            raise ControllerUnreachable("away")
        self.heard.append(info)
        self.resident.clear()
        self.last_sequence = None
        return ReportReply()

    async def report(self, report: ReplicaReport) -> ReportReply:
        if self.is_away:
            raise ControllerUnreachable("away")
        reply = self._take(report)
        if self.loses_replies:
            raise ControllerUnreachable("too late")
        return reply

    def _take(self, report: ReplicaReport) -> ReportReply:
        self.heard.append(report)
        self.finished_leases += report.finished_leases
        if self.reply.unknown:
            return self.reply
        if report.is_snapshot:
            self.resident = set(report.events.stored_device)
        elif self.last_sequence is None or report.sequence_number != self.last_sequence + 1:
            return ReportReply(needs_snapshot=True)
        self.resident |= set(report.events.stored_device)
        self.resident -= set(report.events.removed_device)
        self.last_sequence = report.sequence_number
        digest = 0
        for route_hash in self.resident:
            digest ^= int.from_bytes(route_hash)
        assert report.digest_device == digest
        return self.reply

    @property
    def reports(self) -> list[ReplicaReport]:
        return [heard for heard in self.heard if isinstance(heard, ReplicaReport)]


class Bench:
    """A reporter with everything around it in the test's hands."""

    def __init__(self, **options: float) -> None:
        self.now = 100.0
        self.engine = FakeEngine()
        self.controller = FakeController()
        self.fences = 0
        self.drains: list[float] = []
        identity = self.engine.scheduler._identity
        info = ReplicaInfo(
            "r0", "inc", "m", identity, "1.2.3.4:5", "secret", 64, 0, 256, 8, 1000.0, 0.02
        )
        card = ModelCard("m", "/tokenizer", identity, 256, 100, (2,))
        self.reporter = Reporter(
            self.engine,
            self.controller,
            info,
            card,
            on_fence=self._fence,
            on_drain=self.drains.append,
            clock=lambda: self.now,
            **options,
        )

    def _fence(self) -> None:
        self.fences += 1

    async def tick(self, after_s: float = 0.0) -> float:
        self.now += after_s
        return await self.reporter.tick()

    async def settle(self) -> None:
        """Registered, first report sent."""
        await self.tick()
        await self.tick()

    def resident_hashes(self) -> set[bytes]:
        return set(self.engine.scheduler.route_snapshot()[0].stored_device)


async def test_registers_then_reports_a_snapshot() -> None:
    bench = Bench()
    bench.engine.run("a", num_prompt=32)
    await bench.settle()
    info, report = bench.controller.heard
    assert isinstance(info, ReplicaInfo)
    assert (report.sequence_number, report.is_snapshot, report.incarnation) == (1, True, "inc")
    assert report.device.total == 64
    assert report.steps_done == bench.engine.steps_done
    assert report.decode_step_s == 0.02
    assert report.prefill_tokens_per_s > 0.0
    assert report.copy_bytes_per_s > 0.0
    assert bench.controller.resident == bench.resident_hashes() != set()


async def test_reports_each_second_while_nothing_changes() -> None:
    bench = Bench()
    await bench.settle()
    assert await bench.tick() == pytest.approx(1.0)
    assert await bench.tick(0.6) == pytest.approx(0.4)
    assert len(bench.controller.reports) == 1
    await bench.tick(0.4)
    assert [r.sequence_number for r in bench.controller.reports] == [1, 2]


async def test_a_change_is_reported_at_once_but_not_too_often() -> None:
    bench = Bench()
    await bench.settle()
    bench.now += 0.2
    bench.engine.run("a", num_prompt=32)
    bench.reporter.notice_change()
    await bench.tick()
    assert len(bench.controller.reports) == 2
    assert bench.controller.resident == bench.resident_hashes() != set()
    bench.reporter.notice_change()
    assert await bench.tick(0.01) == pytest.approx(0.04)
    assert len(bench.controller.reports) == 2
    await bench.tick(0.04)
    assert len(bench.controller.reports) == 3


async def test_only_differences_are_reported() -> None:
    bench = Bench()
    bench.engine.run("a", num_prompt=32)
    await bench.settle()
    await bench.tick(1.0)
    assert bench.controller.reports[-1].events.stored_device == ()
    dropped = bench.engine.scheduler.reset_prefix_cache()
    assert dropped > 0
    await bench.tick(1.0)
    last = bench.controller.reports[-1]
    assert set(last.events.removed_device) != set()
    assert bench.controller.resident == set()
    assert last.epoch == 1
    assert last.digest_device == 0


async def test_a_lost_report_is_made_good_by_a_snapshot() -> None:
    """The controller sees the gap in the numbers; what the lost report said is in the snapshot."""
    bench = Bench()
    await bench.settle()
    bench.controller.is_away = True
    bench.engine.run("a", num_prompt=32)
    await bench.tick(1.0)
    bench.controller.is_away = False
    assert await bench.tick(0.1) == pytest.approx(0.9), "a pause after the failure"
    await bench.tick(1.0)
    assert bench.controller.reports[-1].is_snapshot is False
    await bench.tick(0.05)
    assert bench.controller.reports[-1].is_snapshot
    assert bench.controller.resident == bench.resident_hashes() != set()
    assert bench.reporter.num_failed_calls == 1


async def test_an_order_to_drain_is_obeyed_and_confirmed() -> None:
    bench = Bench()
    await bench.settle()
    bench.controller.reply = ReportReply(draining=True, drain_s=12.0)
    await bench.tick(1.0)
    assert bench.drains == [12.0]
    bench.reporter.is_draining = True
    await bench.tick(1.0)
    assert [report.draining for report in bench.controller.reports[-2:]] == [False, True]


async def test_counts_of_what_happened_are_told() -> None:
    bench = Bench()
    for number in range(8):
        bench.engine.run(f"q{number}", num_prompt=200)
    await bench.settle()
    counters = bench.controller.reports[-1].counters
    assert counters.blocks_evicted == bench.engine.scheduler.stats().blocks_evicted > 0


async def test_sends_maps_of_its_pools_now_and_then_while_they_are_asked_for() -> None:
    bench = Bench(map_interval_s=0.45)
    await bench.settle()
    bench.controller.reply = ReportReply(map_cells=16)
    with_map: list[int] = []
    for number in range(14):
        bench.reporter.notice_change()
        await bench.tick(0.1)
        report = bench.controller.reports[-1]
        if report.device_map is not None:
            with_map.append(number)
            assert (report.device_map.num_blocks, len(report.device_map.cells)) == (64, 16)
            assert report.host_map is not None
    assert with_map == [1, 6, 11]
    bench.controller.reply = ReportReply()
    await bench.tick(1.0)
    await bench.tick(1.0)
    assert bench.controller.reports[-1].device_map is None


async def test_output_lengths_are_told_once() -> None:
    bench = Bench()
    await bench.settle()
    bench.engine.output_lengths = (5, 9)
    await bench.tick(1.0)
    await bench.tick(1.0)
    told = [report.finished_output_tokens for report in bench.controller.reports[-2:]]
    assert told == [(5, 9), ()]


async def test_finished_leases_are_told_until_a_reply_came() -> None:
    bench = Bench()
    await bench.settle()
    finished = iter([(7, 8), (), (9,), ()])
    bench.engine.scheduler.take_finished_leases = lambda: next(finished, ())
    bench.controller.is_away = True
    await bench.tick(1.0)
    bench.controller.is_away = False
    await bench.tick(1.0)
    assert bench.controller.finished_leases == [7, 8]
    bench.controller.loses_replies = True
    await bench.tick(1.0)
    bench.controller.loses_replies = False
    await bench.tick(1.0)
    assert bench.controller.finished_leases == [7, 8, 9, 9], "twice, rather than never"
    await bench.tick(1.0)
    assert bench.controller.reports[-1].finished_leases == ()


async def test_registers_again_with_a_controller_that_does_not_know_us() -> None:
    bench = Bench()
    bench.engine.run("a", num_prompt=32)
    await bench.settle()
    bench.controller.reply = ReportReply(unknown=True)
    bench.controller.resident.clear()
    await bench.tick(1.0)
    bench.controller.reply = ReportReply()
    await bench.tick()
    await bench.tick(0.05)
    assert isinstance(bench.controller.heard[-2], ReplicaInfo)
    assert bench.controller.reports[-1].is_snapshot
    assert bench.controller.resident == bench.resident_hashes() != set()


async def test_keeps_trying_to_register() -> None:
    bench = Bench(retry_s=0.5)
    bench.controller.is_away = True
    assert await bench.tick() == 0.5
    assert await bench.tick(0.5) == 0.5
    bench.controller.is_away = False
    await bench.tick(0.5)
    await bench.tick(0.5)
    assert len(bench.controller.heard) == 2


async def test_a_fence_is_obeyed() -> None:
    bench = Bench()
    await bench.settle()
    bench.controller.reply = ReportReply(fence=True)
    await bench.tick(1.0)
    assert bench.fences == 1


async def test_a_long_step_does_not_silence_the_replica() -> None:
    """The last numbers go out again, with a pulse that stands still, until we are let in."""
    bench = Bench(max_interval_s=0.01)
    bench.engine.run("a", num_prompt=32)
    await bench.settle()
    bench.engine.is_busy = True
    await bench.tick(0.01)
    await bench.tick(0.01)
    assert [r.sequence_number for r in bench.controller.reports] == [1, 2, 3]
    assert bench.controller.reports[-1].events.stored_device == ()
    assert bench.controller.reports[-1].device == bench.controller.reports[0].device
    bench.engine.end_step()
    bench.engine.run("b", num_prompt=40)
    await bench.tick(0.01)
    await bench.tick(0.01)
    assert bench.controller.resident == bench.resident_hashes()
    assert not any(r.is_snapshot for r in bench.controller.reports[1:])


async def test_stops_when_the_engine_has_ended() -> None:
    bench = Bench()
    await bench.settle()
    bench.engine.has_ended = True
    bench.now += 1.0
    await bench.reporter.run()
    assert len(bench.controller.reports) == 1


async def test_an_order_to_forget_is_obeyed_once_and_told() -> None:
    bench = Bench()
    bench.engine.run("a", num_prompt=32)
    await bench.settle()
    bench.controller.reply = ReportReply(reset_order=7)
    await bench.tick(1.0)
    assert bench.controller.reports[-1].reset_order == 0, "told before it was ordered"
    bench.engine.run("b", num_prompt=32)
    await bench.tick(1.0)
    await bench.tick(1.0)
    done = bench.controller.reports[-1]
    assert (done.reset_order, done.epoch) == (7, 1)
    assert done.reset_blocks > 0
    assert bench.engine.scheduler.epoch == 1


async def test_an_order_to_renew_is_remembered() -> None:
    bench = Bench()
    await bench.settle()
    bench.controller.reply = ReportReply(draining=True, drain_s=3.0, renews=True)
    await bench.tick(1.0)
    assert (bench.drains, bench.reporter.renews) == ([3.0], True)
    await bench.tick(1.0)
    assert bench.controller.reports[-1].renews
