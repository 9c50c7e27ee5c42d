"""A whole replica without Ray: a tiny model, its engine, the data plane and reports."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engine_fakes import make_request
from tiny_model import make_tiny_model

from pagefleet.cluster.engine_client import EngineClient, EngineStream, ReplicaLost
from pagefleet.protos.messages import (
    FinishReason,
    Lease,
    ModelCard,
    ReplicaInfo,
    ReplicaReport,
    ReportReply,
    SequenceDelta,
)
from pagefleet.scheduler.output import ModelRunnerOutput, SchedulerOutput
from pagefleet.workers.config import WorkerConfig
from pagefleet.workers.heartbeat import read_beats
from pagefleet.workers.leader import Leader
from pagefleet.workers.loaded_engine import LoadedEngine, load_engine
from pagefleet.workers.replica_end import ReplicaEnd

WAIT_S = 60.0


class Controller:
    """Hears one leader; called on the leader's loop."""

    def __init__(self) -> None:
        self.registered: list[tuple[ReplicaInfo, ModelCard]] = []
        self.reports: list[ReplicaReport] = []
        self.reply = ReportReply()
        self._state = threading.Condition()

    async def register_replica(self, info: ReplicaInfo, card: ModelCard) -> ReportReply:
        self.registered.append((info, card))
        return ReportReply()

    async def report(self, report: ReplicaReport) -> ReportReply:
        with self._state:
            self.reports.append(report)
            self._state.notify_all()
        return self.reply

    def wait_for(self, number: int) -> ReplicaReport:
        with self._state:
            assert self._state.wait_for(lambda: len(self.reports) >= number, WAIT_S)
            return self.reports[-1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def loaded(model: Path) -> LoadedEngine:
    return load_engine(WorkerConfig(str(model), num_blocks=64, num_threads=1))


class Bench:
    """A leader and a gateway's stream to it."""

    def __init__(self, loaded: LoadedEngine) -> None:
        self.controller = Controller()
        self.leader = Leader("r0", "tiny", loaded, self.controller, host="127.0.0.1")
        self.client = EngineClient("gw")

    def submit(self, key: str, max_tokens: int = 20, num_prompt: int = 40) -> EngineStream:
        info = self.leader.info
        lease = Lease(
            1, key, 0, "r0", info.incarnation, info.address, info.stream_secret, 4, 0, 10.0
        )
        request = make_request(key, num_prompt=num_prompt, max_tokens=max_tokens, ignore_eos=True)
        return self.client.submit(lease, request)

    async def read(self, stream: EngineStream) -> list[SequenceDelta]:
        deltas: list[SequenceDelta] = []
        async with asyncio.timeout(WAIT_S):
            while not deltas or deltas[-1].finish_reason is None:
                deltas += await stream.next_deltas()
        return deltas

    async def close(self) -> None:
        await self.client.close()
        await asyncio.to_thread(self.leader.close)


@pytest.fixture
async def bench(loaded: LoadedEngine) -> AsyncIterator[Bench]:
    bench = await asyncio.to_thread(Bench, loaded)
    yield bench
    await bench.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("pagefleet")]


async def test_says_what_it_is_and_serves(bench: Bench) -> None:
    ((info, card),) = bench.controller.registered
    assert info == bench.leader.info
    assert (info.replica_id, info.model, info.num_blocks) == ("r0", "tiny", 64)
    assert len(info.stream_secret) >= 32
    assert info.block_bytes > 0
    assert info.prefill_tokens_per_s > 0
    assert info.decode_step_s > 0
    assert card.identity == info.identity
    assert Path(card.tokenizer_dir, "tokenizer.json").is_file()
    assert bench.controller.reports[0].is_snapshot
    deltas = await bench.read(bench.submit("a"))
    assert sum(len(delta.token_ids) for delta in deltas) == 20
    assert deltas[-1].usage.completion_tokens == 20


async def test_what_became_resident_is_reported_soon(bench: Bench) -> None:
    await bench.read(bench.submit("a"))
    while True:
        report = bench.controller.reports[-1]
        if report.device.cached_idle:
            break
        await asyncio.to_thread(bench.controller.wait_for, len(bench.controller.reports) + 1)
    assert report.steps_done >= 20
    stored = [h for r in bench.controller.reports for h in r.events.stored_device]
    assert len(stored) == len(set(stored)) > 0
    assert await asyncio.to_thread(bench.leader.reset_prefix_cache) == report.device.cached_idle
    last = await asyncio.to_thread(bench.controller.wait_for, len(bench.controller.reports) + 2)
    assert last.epoch == 1
    assert last.digest_device == 0


async def test_drains(bench: Bench) -> None:
    stream = bench.submit("a")
    await stream.next_deltas()
    bench.leader.drain(WAIT_S)
    (end,) = await bench.read(bench.submit("late"))
    assert end.error_class == "Unavailable"
    deltas = await bench.read(stream)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    ended = await asyncio.wait_for(asyncio.to_thread(bench.leader.wait_ended), WAIT_S)
    assert ended == ReplicaEnd("drained", drained=True)


async def test_an_empty_replica_drains_at_once(bench: Bench) -> None:
    bench.controller.reply = ReportReply(draining=True, drain_s=WAIT_S)
    ended = await asyncio.wait_for(asyncio.to_thread(bench.leader.wait_ended), WAIT_S)
    assert ended.drained


async def test_streams_that_outlast_the_drain_are_moved(bench: Bench) -> None:
    stream = bench.submit("a", max_tokens=500)
    await stream.next_deltas()
    bench.controller.reply = ReportReply(draining=True, drain_s=WAIT_S)
    await asyncio.to_thread(bench.controller.wait_for, len(bench.controller.reports) + 2)
    assert bench.leader.stats().num_running == 1
    bench.leader.drain(0.0)  # a later order may be stricter
    end = (await bench.read(stream))[-1]
    assert (end.error_class, end.error) == ("Unavailable", "moved: the replica is draining")
    ended = await asyncio.wait_for(asyncio.to_thread(bench.leader.wait_ended), WAIT_S)
    assert ended.drained
    assert bench.leader.stats().device.referenced == 0


async def test_output_lengths_are_reported(bench: Bench) -> None:
    await bench.read(bench.submit("a", max_tokens=7))
    cancelled = bench.submit("b", max_tokens=500)
    await cancelled.next_deltas()
    cancelled.close(cancel=True)
    await bench.read(bench.submit("c", max_tokens=9))
    while True:
        reports = list(bench.controller.reports)
        lengths = [length for report in reports for length in report.finished_output_tokens]
        if len(lengths) >= 2:
            break
        await asyncio.to_thread(bench.controller.wait_for, len(reports) + 1)
    assert lengths == [7, 9]


async def test_a_fence_ends_it(bench: Bench) -> None:
    bench.controller.reply = ReportReply(fence=True)
    ended = await asyncio.wait_for(asyncio.to_thread(bench.leader.wait_ended), WAIT_S)
    assert "declared dead" in ended.reason
    await asyncio.to_thread(bench.leader.close)
    with pytest.raises(ReplicaLost):
        await bench.read(bench.submit("late"))


async def test_a_step_that_breaks_ends_it(
    bench: Bench, loaded: LoadedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = bench.submit("a", max_tokens=500)
    await stream.next_deltas()

    def break_down(output: SchedulerOutput) -> ModelRunnerOutput:
        raise RuntimeError("device lost")

    monkeypatch.setattr(loaded.runner, "execute", break_down)
    end = (await bench.read(stream))[-1]
    assert (end.finish_reason, end.error_class) == (FinishReason.ERROR, "Unavailable")
    ended = await asyncio.wait_for(asyncio.to_thread(bench.leader.wait_ended), WAIT_S)
    assert "device lost" in ended.reason
    assert not ended.drained


async def test_c15_a_prompt_cancelled_between_its_chunks_gives_its_blocks_back(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = WorkerConfig(str(model), num_blocks=160, num_threads=1, prefill_chunk=32)
    loaded = await asyncio.to_thread(load_engine, config)
    num_steps, reached, cancelled = 0, threading.Event(), threading.Event()
    real = loaded.runner.execute

    def execute(output: SchedulerOutput) -> ModelRunnerOutput:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 10:
            reached.set()
            assert cancelled.wait(WAIT_S)
        return real(output)

    monkeypatch.setattr(loaded.runner, "execute", execute)
    bench = await asyncio.to_thread(Bench, loaded)
    try:
        stream = bench.submit("long", num_prompt=2000)
        assert await asyncio.to_thread(reached.wait, WAIT_S)
        stream.close(cancel=True)
        while loaded.engine.num_requests:
            await asyncio.sleep(0.001)  # the cancel is on its way through a socket
        cancelled.set()
        device = bench.leader.stats().device
        while device.referenced + device.fenced:
            device = await asyncio.to_thread(lambda: bench.leader.stats().device)
        assert num_steps <= 10 + 2
        assert device.free == 160
        assert len(await bench.read(bench.submit("next"))) > 0
    finally:
        await bench.close()


async def test_c30_two_that_outgrow_the_pool_together_both_finish(model: Path) -> None:
    """Each ends with 9 blocks, there are 14: one has to give way, once or twice and no more."""
    config = WorkerConfig(str(model), num_blocks=14, num_threads=1, deterministic=True)
    bench = await asyncio.to_thread(Bench, await asyncio.to_thread(load_engine, config))
    try:
        alone = [await bench.read(bench.submit(key, max_tokens=100)) for key in "ab"]
        streams = [bench.submit(key, max_tokens=100) for key in ("a", "b")]
        together = await asyncio.gather(*(bench.read(stream) for stream in streams))
        for deltas, expected in zip(together, alone, strict=True):
            tokens = [token for delta in deltas for token in delta.token_ids]
            assert tokens == [token for delta in expected for token in delta.token_ids]
            assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert 1 <= bench.leader.stats().preemptions <= 4
    finally:
        await bench.close()


def test_it_gives_signs_of_life_where_somebody_wants_them(
    loaded: LoadedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PAGEFLEET_HEARTBEATS", str(tmp_path))
    leader = Leader("r0", "tiny", loaded, Controller(), host="127.0.0.1")
    until = time.monotonic() + WAIT_S
    while not (beats := list(read_beats(tmp_path))):
        assert time.monotonic() < until
    assert (beats[0].name, beats[0].pulse.num_working) == ("r0", 0)
    leader.close()
    assert list(tmp_path.iterdir()) == []
