"""Two replicas with real engines and models that exchange prefixes, over a link without Ray."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_fakes import Recorder, make_request
from tiny_model import make_tiny_model

from pagefleet.protos.messages import (
    ModelCard,
    PrefixTransfer,
    ReplicaInfo,
    ReplicaReport,
    ReportReply,
    TransferPeer,
)
from pagefleet.workers.block_staging import BlockBatch
from pagefleet.workers.config import WorkerConfig
from pagefleet.workers.faults import Faults
from pagefleet.workers.leader import Leader
from pagefleet.workers.loaded_engine import load_engine
from pagefleet.workers.prefix_mover import (
    ExportGrant,
    ExportRequest,
    PrefixOffer,
    TransferFailed,
)
from pagefleet.workers.ray_transfers import read_shard

WAIT_S = 30.0
PROMPT = tuple(int(token) for token in np.random.default_rng(7).integers(3, 200, 200))


class Controller:
    """Hears one leader."""

    def __init__(self) -> None:
        self.reports: list[ReplicaReport] = []
        self.reply = ReportReply()
        self._state = threading.Condition()

    async def register_replica(self, info: ReplicaInfo, card: ModelCard) -> ReportReply:
        return ReportReply()

    async def report(self, report: ReplicaReport) -> ReportReply:
        with self._state:
            self.reports.append(report)
            self._state.notify_all()
        return self.reply

    def wait_for(self, condition: Callable[[ReplicaReport], object]) -> ReplicaReport:
        with self._state:
            assert self._state.wait_for(lambda: condition(self.reports[-1]), WAIT_S)
            return self.reports[-1]


class Link:
    """The other replica in this process. fault: called before each step of a transfer."""

    def __init__(self) -> None:
        self.peers: dict[str, Replica] = {}
        self.own: Replica | None = None
        self.steps: list[str] = []
        self.fault: Callable[[str], object] | None = None
        self.spoil = False

    async def _step(self, name: str) -> None:
        self.steps.append(name)
        if self.fault is not None:
            await asyncio.to_thread(self.fault, name)

    async def open_export(
        self, peer: TransferPeer, request: ExportRequest, timeout_s: float
    ) -> ExportGrant | None:
        await self._step("open")
        return await asyncio.to_thread(self.peers[peer.replica_id].leader.open_export, request)

    async def fetch(
        self, peer: TransferPeer, import_id: int, blocks: tuple[int, ...], timeout_s: float
    ) -> None:
        await self._step("fetch")
        batch = read_shard(self.peers[peer.replica_id].storage, blocks)
        if self.spoil:
            batch = BlockBatch(batch.blocks ^ 1, batch.checksums)
        assert self.own is not None
        self.own.storage.staged.add(import_id, batch)

    async def close_export(self, peer: TransferPeer, export_id: int, timeout_s: float) -> bool:
        await self._step("close")
        return await asyncio.to_thread(self.peers[peer.replica_id].leader.close_export, export_id)

    async def forget(self, import_id: int) -> None:
        assert self.own is not None
        self.own.storage.staged.take(import_id)
        self.steps.append("forget")

    async def offer(self, peer: TransferPeer, offer: PrefixOffer, timeout_s: float) -> bool:
        return await asyncio.to_thread(self.peers[peer.replica_id].leader.take_over, offer)


class Replica:
    def __init__(self, name: str, model: Path) -> None:
        config = WorkerConfig(
            str(model),
            num_blocks=64,
            host_memory=1 << 20,
            num_threads=1,
            deterministic=True,
            faults=Faults(late_copies=True),
        )
        self.name = name
        self.loaded = load_engine(config)
        self.storage = self.loaded.runner.storage
        self.link = Link()
        self.link.own = self
        self.controller = Controller()
        self.leader = Leader(
            name,
            "tiny",
            self.loaded,
            self.controller,
            host="127.0.0.1",
            transfers=self.link,
            actors=(f"{name}/0",),
        )

    @property
    def peer(self) -> TransferPeer:
        return TransferPeer(self.name, self.leader.info.incarnation, self.leader.info.actors)

    def ask(self, key: str, transfer: PrefixTransfer | None = None) -> tuple[list[int], int]:
        """The answer to PROMPT, and how many of its tokens were cached."""
        sink = Recorder()
        request = make_request(key, max_tokens=8, ignore_eos=True)
        request = replace(request, prompt_token_ids=PROMPT, transfer=transfer)
        self.loaded.engine.submit(request, sink)
        sink.wait_for(lambda: sink.ends(key))
        usage = sink.ends(key)[0].usage
        assert usage is not None, sink.ends(key)
        return sink.tokens(key), usage.cached_tokens

    def check_idle(self) -> None:
        """Nothing is pinned, fenced or staged."""

        def look(scheduler):
            scheduler.check_integrity()
            return scheduler.stats(), len(scheduler.exports), len(scheduler.imports)

        stats, num_exports, num_imports = self.loaded.engine.call(look).result(10.0)
        for tier in (stats.device, stats.host):
            assert tier.referenced == tier.fenced == 0, stats
        assert num_exports == num_imports == len(self.storage.staged) == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def replicas(model: Path) -> Iterator[tuple[Replica, Replica]]:
    pair = Replica("a", model), Replica("b", model)
    for one in pair:
        one.link.peers = {other.name: other for other in pair}
        # measured on an idle machine, loading may lose to so small a model
        one.loaded.engine.call(lambda s: setattr(s._books.costs, "copy_bytes_per_s", 1e12)).result(
            10.0
        )
    yield pair
    for one in pair:
        one.leader.close()


def transfer_from(source: Replica, timeout_s: float = 20.0) -> PrefixTransfer:
    return PrefixTransfer(source.peer, len(PROMPT), timeout_s)


def test_a_prefix_is_fetched_instead_of_computed(replicas: tuple[Replica, Replica]) -> None:
    source, target = replicas
    tokens, cached = source.ask("first")
    assert cached == 0
    assert target.ask("second", transfer_from(source)) == (tokens, 192)
    assert target.link.steps == ["open", "fetch", "close"]
    source.check_idle()
    target.check_idle()
    stats = target.controller.wait_for(lambda report: report.transfers.done).transfers
    assert (stats.done, stats.failed, stats.blocks) == (1, 0, 12)
    assert stats.num_bytes == 12 * target.leader.info.block_bytes
    assert stats.bytes_per_s > 0.0 and stats.overhead_s > 0.0


def die(name: str) -> Callable[[str], object]:
    """The source ends at this step of a transfer."""

    def fault(step: str) -> None:
        if step == name:
            raise TransferFailed("its process is lost")

    return fault


@pytest.mark.parametrize("step", ["open", "fetch", "close"])
def test_a_source_that_dies_costs_a_recompute(replicas: tuple[Replica, Replica], step: str) -> None:
    source, target = replicas
    tokens, _ = source.ask("first")
    target.link.fault = die(step)
    assert target.ask("second", transfer_from(source)) == (tokens, 0)
    target.check_idle()


def test_a_source_that_hangs_is_not_waited_for(replicas: tuple[Replica, Replica]) -> None:
    source, target = replicas
    tokens, _ = source.ask("first")
    going_on = threading.Event()
    target.link.fault = lambda step: going_on.wait(20.0) if step == "fetch" else None
    assert target.ask("second", transfer_from(source, timeout_s=0.2)) == (tokens, 0)
    going_on.set()
    target.check_idle()


def test_spoilt_blocks_are_not_used(replicas: tuple[Replica, Replica]) -> None:
    source, target = replicas
    tokens, _ = source.ask("first")
    target.link.spoil = True
    assert target.ask("second", transfer_from(source)) == (tokens, 0)
    target.check_idle()


def test_another_incarnation_gives_nothing(replicas: tuple[Replica, Replica]) -> None:
    source, target = replicas
    tokens, _ = source.ask("first")
    old = replace(transfer_from(source), source=replace(source.peer, incarnation="earlier"))
    assert target.ask("second", old) == (tokens, 0)
    assert target.link.steps == ["open", "forget"]
    source.check_idle()


def test_a_reset_on_the_way_costs_a_recompute(replicas: tuple[Replica, Replica]) -> None:
    source, target = replicas
    tokens, _ = source.ask("first")
    target.link.fault = lambda step: source.leader.reset_prefix_cache() if step == "close" else None
    assert target.ask("second", transfer_from(source)) == (tokens, 0)
    source.check_idle()
    target.check_idle()


def test_a_replica_that_drains_leaves_its_prefixes_to_others(
    replicas: tuple[Replica, Replica],
) -> None:
    source, target = replicas
    tokens, _ = source.ask("first")
    source.controller.reply = replace(
        source.controller.reply, draining=True, drain_s=20.0, peers=(target.peer,)
    )
    assert source.leader.wait_ended().drained
    assert target.ask("second") == (tokens, 192)
    target.check_idle()


def test_peers_that_drain_too_take_nothing_over(replicas: tuple[Replica, Replica]) -> None:
    source, target = replicas
    source.ask("first")
    for one, other in ((target, source), (source, target)):
        one.controller.reply = replace(
            one.controller.reply, draining=True, drain_s=20.0, peers=(other.peer,)
        )
    assert target.leader.wait_ended().drained
    assert source.leader.wait_ended().drained
