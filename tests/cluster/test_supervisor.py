"""The supervisor with replicas that are only futures."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from fresh_process import loaded_with

from pagefleet.cluster.controller_notices import ControllerView
from pagefleet.cluster.replica import ReplicaFailed, ReplicaSpec
from pagefleet.cluster.supervisor import Supervisor
from pagefleet.protos.messages import CacheIdentity, ReplicaInfo, WantedWeights
from pagefleet.workers.config import WorkerConfig
from pagefleet.workers.process_identity import ProcessIdentity
from pagefleet.workers.replica_end import ReplicaEnd

WAIT_S = 20.0


def make_info(replica_id: str, incarnation: str) -> ReplicaInfo:
    identity = CacheIdentity("f", 0, "float32", 16)
    return ReplicaInfo(
        replica_id, incarnation, "m", identity, "1.2.3.4:5", "s", 8, 0, 64, 4, 1.0, 1.0
    )


@dataclass
class FakeReplica:
    """One incarnation; the test decides when it ends and whether it starts or can be killed."""

    info: ReplicaInfo
    events: list[str]
    start_error: Exception | None = None
    kill_errors: list[Exception] = field(default_factory=list)
    starts: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    drained: bool = False
    renews: bool = False

    @property
    def process(self) -> ProcessIdentity:
        return ProcessIdentity("node", 1, 1)

    async def start(self) -> ReplicaInfo:
        self.events.append(f"start {self.info.incarnation}")
        await self.starts.wait()
        if self.start_error is not None:
            raise self.start_error
        return self.info

    async def wait_ended(self) -> ReplicaEnd:
        await self.ended.wait()
        return ReplicaEnd("its process is lost", drained=self.drained, renews=self.renews)

    async def drain(self, drain_s: float) -> None:
        self.events.append(f"drain {self.info.incarnation}")
        self.drained = True
        self.ended.set()

    async def kill(self) -> None:
        if self.kill_errors:
            raise self.kill_errors.pop()
        await asyncio.sleep(0)
        self.events.append(f"kill {self.info.incarnation}")


class Fleet:
    """Creates the replicas and plays the controller."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.created: list[FakeReplica] = []
        self.view: ControllerView | None = None
        self.now = 100.0
        self.num_looks = 0
        self.is_frozen = False
        self.wanted: WantedWeights | None = None
        self.configs: list[WorkerConfig] = []
        self.prepare: Callable[[FakeReplica], None] = lambda replica: replica.starts.set()
        self._changed = asyncio.Event()

    def create(self, spec: ReplicaSpec) -> FakeReplica:
        number = sum(r.info.replica_id == spec.replica_id for r in self.created)
        info = make_info(spec.replica_id, f"{spec.replica_id}.{number}")
        replica = FakeReplica(info, self.events)
        self.configs.append(spec.config)
        self.prepare(replica)
        self.created.append(replica)
        self._changed.set()
        return replica

    async def look(self) -> ControllerView | None:
        self.num_looks += 1
        if self.is_frozen:
            raise TimeoutError
        return self.view

    async def wait_looks(self, number: int) -> None:
        """Wait until the supervisor has looked so often again, and has drawn its conclusions."""
        target = self.num_looks + number + 1
        async with asyncio.timeout(WAIT_S):
            while self.num_looks < target:
                await asyncio.sleep(0)

    async def end_controller(self) -> None:
        self.events.append("end controller")

    async def wanted_weights(self, model: str) -> WantedWeights | None:
        return self.wanted

    async def replica_wanted(self, replica_id: str) -> None:
        self.events.append(f"wanted {replica_id}")

    async def replica_draining(self, info: ReplicaInfo, drain_s: float) -> None:
        self.events.append(f"draining {info.incarnation}")

    async def replica_gone(self, info: ReplicaInfo) -> None:
        self.events.append(f"gone {info.incarnation}")

    async def wait_created(self, number: int) -> FakeReplica:
        async with asyncio.timeout(WAIT_S):
            while len(self.created) < number:
                self._changed.clear()
                await self._changed.wait()
        return self.created[number - 1]


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
async def make_supervisor(fleet: Fleet) -> AsyncIterator[Callable[..., Supervisor]]:
    supervisors: list[Supervisor] = []

    def make(*replica_ids: str, **options: float) -> Supervisor:
        specs = [ReplicaSpec(name, "m", WorkerConfig("folder")) for name in replica_ids]
        timing = {"poll_s": 0.001, "backoff_s": 0.001, "clock": lambda: fleet.now, **options}
        supervisors.append(Supervisor(specs, fleet.create, fleet, **timing))
        return supervisors[-1]

    yield make
    for supervisor in supervisors:
        await supervisor.stop()
    started = {event.split()[1] for event in fleet.events if event.startswith("start ")}
    killed = {event.split()[1] for event in fleet.events if event.startswith("kill")}
    assert started == killed, "none is left running"


MakeSupervisor = Callable[..., Supervisor]


async def test_starts_every_replica(fleet: Fleet, make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor("a", "b")
    infos = await supervisor.start()
    assert [info.incarnation for info in infos] == ["a.0", "b.0"]
    assert supervisor.infos() == infos
    assert set(supervisor.processes()) == {"a", "b"}


async def test_a_replica_that_dies_begins_again_once_it_is_gone(
    fleet: Fleet, make_supervisor: MakeSupervisor
) -> None:
    supervisor = make_supervisor("a", "b")
    await supervisor.start()
    fleet.created[0].ended.set()
    replacement = await fleet.wait_created(3)
    assert replacement.info.incarnation == "a.1"
    mine = [event for event in fleet.events if " a." in event]
    assert mine[:3] == ["start a.0", "kill a.0", "gone a.0"]
    while len(supervisor.infos()) < 2:
        await asyncio.sleep(0)
    assert {info.incarnation for info in supervisor.infos()} == {"a.1", "b.0"}
    assert supervisor.num_restarts == 1


async def test_a_frozen_replica_is_replaced_when_the_controller_says_it_is_dead(
    fleet: Fleet, make_supervisor: MakeSupervisor
) -> None:
    supervisor = make_supervisor("a")
    await supervisor.start()
    fleet.view = ControllerView(dead=frozenset({"a.0", "of another cluster"}))
    replacement = await fleet.wait_created(2)
    assert replacement.info.incarnation == "a.1"
    assert "kill a.0" in fleet.events


async def test_one_declared_dead_before_its_start_returned_is_replaced(
    fleet: Fleet, make_supervisor: MakeSupervisor
) -> None:
    fleet.prepare = lambda replica: None
    supervisor = make_supervisor("a")
    starting = asyncio.create_task(supervisor.start())
    first = await fleet.wait_created(1)
    fleet.view = ControllerView(dead=frozenset({"a.0"}))
    await fleet.wait_looks(1)
    fleet.view = None
    fleet.prepare = lambda replica: replica.starts.set()
    first.starts.set()
    await starting
    await fleet.wait_created(2)


async def test_one_that_the_controller_does_not_know_is_replaced(
    fleet: Fleet, make_supervisor: MakeSupervisor
) -> None:
    """Frozen while the controller restarted: it never registers, so nobody declares it dead."""
    supervisor = make_supervisor("a", "b", missing_s=10.0)
    await supervisor.start()
    fleet.view = ControllerView(known=frozenset({"b.0"}))
    await fleet.wait_looks(2)
    fleet.now += 9.0
    fleet.view = None  # while the controller is away nobody is missing
    await fleet.wait_looks(2)
    fleet.view = ControllerView(known=frozenset({"b.0"}))
    await fleet.wait_looks(2)
    fleet.now += 9.0
    await fleet.wait_looks(2)
    assert len(fleet.created) == 2
    fleet.now += 2.0
    assert (await fleet.wait_created(3)).info.incarnation == "a.1"


async def test_a_controller_that_answers_no_more_is_ended(
    fleet: Fleet, make_supervisor: MakeSupervisor
) -> None:
    supervisor = make_supervisor("a", missing_s=10.0)
    await supervisor.start()
    await fleet.wait_looks(2)
    fleet.now += 20.0  # it restarts, which is no reason to end it
    await fleet.wait_looks(2)
    fleet.is_frozen = True
    fleet.now += 9.0
    await fleet.wait_looks(2)
    assert "end controller" not in fleet.events
    fleet.now += 2.0
    await fleet.wait_looks(2)
    assert "end controller" in fleet.events
    assert len(fleet.created) == 1, "the replicas are not touched"


async def test_a_drained_replica_goes_for_good(
    fleet: Fleet, make_supervisor: MakeSupervisor
) -> None:
    supervisor = make_supervisor("a", "b")
    await supervisor.start()
    assert await supervisor.drain("a", 30.0)
    while "gone a.0" not in fleet.events:
        await asyncio.sleep(0)
    while await supervisor.drain("a", 30.0):
        await asyncio.sleep(0)  # its keeper has still to look around once
    assert [info.incarnation for info in supervisor.infos()] == ["b.0"]
    mine = [event for event in fleet.events if " a." in event]
    assert mine == ["start a.0", "draining a.0", "drain a.0", "kill a.0", "gone a.0"]
    assert supervisor.num_restarts == 0


async def test_one_that_the_controller_drains_is_not_rebuilt_when_it_dies(
    fleet: Fleet, make_supervisor: MakeSupervisor
) -> None:
    supervisor = make_supervisor("a", "b")
    await supervisor.start()
    known = frozenset({"a.0", "b.0"})
    fleet.view = ControllerView(known=known, draining=frozenset({"a.0"}))
    await fleet.wait_looks(2)
    fleet.created[0].ended.set()
    while "gone a.0" not in fleet.events:
        await asyncio.sleep(0)
    assert await supervisor.add(ReplicaSpec("c", "m", WorkerConfig("folder")))
    assert [replica.info.incarnation for replica in fleet.created] == ["a.0", "b.0", "c.0"]


async def test_draining_one_that_does_not_serve_yet_ends_it(
    fleet: Fleet, make_supervisor: MakeSupervisor
) -> None:
    supervisor = make_supervisor("a")
    await supervisor.start()
    fleet.prepare = lambda replica: None
    adding = asyncio.create_task(supervisor.add(ReplicaSpec("b", "m", WorkerConfig("folder"))))
    await fleet.wait_created(2)
    with pytest.raises(ReplicaFailed, match="already"):
        await supervisor.add(ReplicaSpec("b", "m", WorkerConfig("folder")))
    assert await supervisor.drain("b", 30.0)
    with pytest.raises(ReplicaFailed, match="before it served"):
        await adding
    assert "kill b.0" in fleet.events
    assert "gone b.0" not in fleet.events, "the controller never knew it"


async def test_a_first_start_that_fails_is_told_and_tried_again(
    fleet: Fleet, make_supervisor: MakeSupervisor
) -> None:
    def break_first(replica: FakeReplica) -> None:
        if replica.info.incarnation == "a.0":
            replica.start_error = ReplicaFailed("no such model")
        replica.starts.set()

    fleet.prepare = break_first
    supervisor = make_supervisor("a", "b")
    with pytest.raises(ReplicaFailed, match="no such model"):
        await supervisor.start()
    await fleet.wait_created(3)
    assert "gone a.0" not in fleet.events, "the controller never knew it"


async def test_a_start_that_hangs_is_given_up(
    fleet: Fleet, make_supervisor: MakeSupervisor
) -> None:
    fleet.prepare = lambda replica: None
    supervisor = make_supervisor("a", start_timeout_s=0.01)
    starting = asyncio.create_task(supervisor.start())
    await fleet.wait_created(1)
    fleet.prepare = lambda replica: replica.starts.set()
    await fleet.wait_created(2)
    (info,) = await starting
    assert info.incarnation == "a.1"


async def test_nothing_starts_before_the_old_processes_are_gone(
    fleet: Fleet, make_supervisor: MakeSupervisor
) -> None:
    supervisor = make_supervisor("a")
    await supervisor.start()
    fleet.created[0].kill_errors = [ReplicaFailed("pid 5 cannot be ended")] * 2
    fleet.created[0].ended.set()
    await fleet.wait_created(2)
    assert fleet.events.index("kill a.0") < fleet.events.index("gone a.0")


async def test_stop_drains_and_ends_what_is_starting_too(
    fleet: Fleet, make_supervisor: MakeSupervisor
) -> None:
    supervisor = make_supervisor("a")
    await supervisor.start()
    fleet.prepare = lambda replica: None
    fleet.created[0].ended.set()
    await fleet.wait_created(2)
    await supervisor.stop(drain_s=1.0)
    assert "kill a.1" in fleet.events
    assert supervisor.infos() == ()


async def test_stop_lets_streams_finish_first(
    fleet: Fleet, make_supervisor: MakeSupervisor
) -> None:
    supervisor = make_supervisor("a")
    await supervisor.start()
    await supervisor.stop(drain_s=1.0)
    assert fleet.events == ["start a.0", "draining a.0", "drain a.0", "kill a.0", "gone a.0"]


async def test_one_that_renews_comes_again_with_the_weights_that_are_wanted_then(
    fleet: Fleet, make_supervisor: MakeSupervisor
) -> None:
    supervisor = make_supervisor("a")
    await supervisor.start()
    fleet.wanted = WantedWeights("other", 3)
    fleet.created[0].drained = fleet.created[0].renews = True
    fleet.created[0].ended.set()
    await fleet.wait_created(2)
    assert [config.model for config in fleet.configs] == ["folder", "other"]
    assert (fleet.configs[1].weights_version, fleet.configs[1].weights_ordered) == (3, True)


async def test_one_that_is_lost_comes_again_with_the_weights_that_are_wanted(
    fleet: Fleet, make_supervisor: MakeSupervisor
) -> None:
    """And keeps them while the controller is away."""
    supervisor = make_supervisor("a")
    await supervisor.start()
    fleet.wanted = WantedWeights("other", 3)
    fleet.created[0].ended.set()
    await fleet.wait_created(2)
    fleet.wanted = None
    fleet.created[1].ended.set()
    await fleet.wait_created(3)
    assert [config.model for config in fleet.configs] == ["folder", "other", "other"]


def test_a_supervisors_process_loads_nothing_of_what_it_starts():
    loaded = loaded_with("cluster.security", "cluster.supervisor_actor")
    assert {"torch", "grpc", "cryptography", "tokenizers"} & loaded == set()
