"""Starting one replica's processes on Ray, and ending them for certain.

Knows placement, actors and processes; nothing of requests, and nothing of how many replicas
there should be.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar, cast
from uuid import uuid4

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from ..protos.messages import ReplicaInfo
from ..workers.config import WorkerConfig
from ..workers.parallel import GroupError
from ..workers.process_identity import ProcessIdentity, kill_for_certain
from ..workers.rank_spec import RankSpec
from ..workers.rank_worker import RankWorker
from ..workers.replica_end import ReplicaEnd
from ..workers.worker import Worker, worker_environment

T = TypeVar("T")

_PLACEMENT_TIMEOUT_S = 60.0
_KILL_TIMEOUT_S = 20.0
_CALLS_AT_ONCE = 24  # `Worker.join` holds one; each transfer of blocks holds some for a while


class ReplicaFailed(Exception):
    """A replica could not be started, or its node cannot be reached to end it."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What a replica is, over all its incarnations.

    model: the name that clients know it by; what is loaded stands in `config`.
    num_cpus, num_gpus: what each rank takes of its node. num_ranks: tensor parallel size.
    """

    replica_id: str
    model: str
    config: WorkerConfig
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    num_ranks: int = 1


class Replica(Protocol):
    """One incarnation, from its creation to its certain end."""

    @property
    def process(self) -> ProcessIdentity | None:
        """Its leader's process; None before that has begun and once it is gone."""
        ...

    async def start(self) -> ReplicaInfo:
        """Place, load, serve, register. Raises ReplicaFailed."""
        ...

    async def wait_ended(self) -> ReplicaEnd:
        """Return, with the reason, once it serves no more."""
        ...

    async def drain(self, drain_s: float) -> None:
        """Let its streams go on for `drain_s`, then move them; it ends once it has none."""
        ...

    async def kill(self) -> None:
        """End its processes and free what they held; returns when they are gone."""
        ...


class RayReplica:
    """A placement group on one node, with a Worker in it and a RankWorker for each further rank.

    Where one rank ends, all do: what is left of a replica cannot compute anything.

    Args:
        placement: a group with a bundle for each rank that is there already, and stays; None = it
            makes one of its own.
    """

    def __init__(
        self,
        spec: ReplicaSpec,
        controller: "ActorHandle[object]",
        placement: PlacementGroup | None = None,
    ) -> None:
        self._spec = spec
        self._controller = controller
        self._given_placement = placement
        self._placement: PlacementGroup | None = None
        self._worker: ActorHandle[object] | None = None
        self._ranks: list[ActorHandle[object]] = []
        self._obeying: list[asyncio.Task[str | None]] = []  # each ends with the reason
        self._processes: list[ProcessIdentity] = []  # the leader's first
        name = f"pagefleet/{spec.replica_id}/{uuid4().hex}"
        self._names = tuple(f"{name}/{rank}" for rank in range(spec.num_ranks))

    @property
    def process(self) -> ProcessIdentity | None:
        """See Replica."""
        return self._processes[0] if self._processes else None

    async def start(self) -> ReplicaInfo:
        """See Replica."""
        asked_at = time.time()
        placement = self._given_placement or await self._place()
        self._worker = worker = self._create_worker(placement)
        others = range(1, self._spec.num_ranks)
        self._ranks = [self._create_rank(placement, rank) for rank in others]
        try:
            for actor in (worker, *self._ranks):
                self._processes.append(await _result(ProcessIdentity, actor.identify.remote()))
            if self._ranks:
                await self._start_ranks(worker)
            return await _result(ReplicaInfo, worker.start.remote(asked_at, self._names))
        except RayTaskError as error:
            raise ReplicaFailed(f"{self._spec.replica_id}: {self._cause(error)}") from error
        except RayError as error:
            raise ReplicaFailed(f"{self._spec.replica_id}: {error}") from error

    async def _start_ranks(self, worker: "ActorHandle[object]") -> None:
        """They load while the leader does, and then obey it to their end."""
        name = f"{self._spec.replica_id}/{uuid4().hex}"
        reply = worker.open_group.remote(name, self._spec.num_ranks)
        group = await _result(RankSpec, reply)
        for index, actor in enumerate(self._ranks, start=1):
            reply = actor.obey.remote(replace(group, rank=index))
            self._obeying.append(asyncio.create_task(_end_of_rank(index, reply)))

    def _cause(self, error: RayTaskError) -> str:
        """Why the start failed: a rank's own reason says more than that the leader lost it."""
        cause = error.cause
        if isinstance(cause, GroupError):
            for task in self._obeying:
                if task.done() and task.result() is not None:
                    return f"{cause}; {task.result()}"
        return str(cause)

    async def wait_ended(self) -> ReplicaEnd:
        """See Replica."""
        assert self._worker is not None, "start() comes first"
        leader = asyncio.create_task(_end_of_leader(self._worker.join.remote()))
        try:
            await asyncio.wait({leader, *self._obeying}, return_when=asyncio.FIRST_COMPLETED)
            reasons = [task.result() for task in self._obeying if task.done()]
            lost = next((reason for reason in reasons if reason is not None), None)
            return await leader if leader.done() or lost is None else ReplicaEnd(lost)
        finally:
            leader.cancel()

    async def drain(self, drain_s: float) -> None:
        """See Replica."""
        assert self._worker is not None, "start() comes first"
        with contextlib.suppress(RayError):  # lost: there is nothing left to drain
            await cast(Awaitable[None], self._worker.drain.remote(drain_s))

    async def kill(self) -> None:
        """See Replica."""
        actors = self._ranks if self._worker is None else [self._worker, *self._ranks]
        for actor in actors:
            ray.kill(actor, no_restart=True)
        for task in self._obeying:
            task.cancel()
        await asyncio.gather(*(self._kill_process(process) for process in self._processes))
        if self._placement is not None:
            remove_placement_group(self._placement)
        self._worker = self._placement = None
        self._ranks, self._obeying, self._processes = [], [], []

    async def _place(self) -> PlacementGroup:
        amounts = {"CPU": self._spec.num_cpus, "GPU": self._spec.num_gpus}
        bundle = {name: amount for name, amount in amounts.items() if amount > 0}
        group = placement_group([bundle] * self._spec.num_ranks, strategy="STRICT_PACK")
        self._placement = group  # before it is waited for, so that `kill` removes it in any case
        try:
            await asyncio.wait_for(group.ready(), _PLACEMENT_TIMEOUT_S)
        except TimeoutError:
            raise ReplicaFailed(
                f"{self._spec.replica_id}: no node has {self._spec.num_ranks} times "
                f"{self._spec.num_cpus:g} CPUs and {self._spec.num_gpus:g} GPUs free; "
                f"all nodes together have {_free_resources()}"
            ) from None
        return group

    def _create_worker(self, placement: PlacementGroup) -> "ActorHandle[object]":
        spec = self._spec
        arguments = (spec.replica_id, spec.model, spec.config, self._controller)
        return self._create_actor(Worker, placement, 0, arguments)

    def _create_rank(self, placement: PlacementGroup, rank: int) -> "ActorHandle[object]":
        return self._create_actor(RankWorker, placement, rank, (self._spec.config,))

    def _create_actor(
        self, kind: type, placement: PlacementGroup, bundle: int, arguments: tuple[object, ...]
    ) -> "ActorHandle[object]":
        num_threads = self._spec.config.num_threads or max(1, int(self._spec.num_cpus))
        options = ray.remote(kind).options(
            name=self._names[bundle],  # by which other replicas find it
            num_cpus=self._spec.num_cpus,
            num_gpus=self._spec.num_gpus,
            max_restarts=0,
            max_task_retries=0,  # Ray would run a call twice and splice the results
            max_concurrency=_CALLS_AT_ONCE,
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement, bundle),
            runtime_env={"env_vars": worker_environment(num_threads)},
        )
        return cast("ActorHandle[object]", options.remote(*arguments))

    async def _kill_process(self, process: ProcessIdentity) -> None:
        """`ray.kill` asks the process itself, which a stopped one never hears."""
        task = ray.remote(kill_for_certain).options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(process.node_id, soft=False),
        )
        try:
            is_gone = await asyncio.wait_for(task.remote(process), _KILL_TIMEOUT_S)
        except (RayError, TimeoutError):
            is_gone = not _is_node_alive(process.node_id)
        if not is_gone:
            raise ReplicaFailed(f"{self._spec.replica_id}: pid {process.pid} cannot be ended")


def _free_resources() -> str:
    free = cast("dict[str, float]", ray.available_resources())
    return " and ".join(f"{free.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))


async def _end_of_leader(reply: object) -> ReplicaEnd:
    try:
        return await _result(ReplicaEnd, reply)
    except RayError as error:
        return ReplicaEnd(f"its process is lost: {type(error).__name__}")


async def _end_of_rank(rank: int, reply: object) -> str | None:
    """Why it was lost; None if the leader sent it home, which will tell the reason itself."""
    try:
        await cast(Awaitable[object], reply)
    except RayTaskError as error:
        return f"rank {rank}: {error.cause}"
    except RayError as error:
        return f"rank {rank}: its process is lost: {type(error).__name__}"
    return None


async def _result(kind: type[T], reply: object) -> T:
    """The answer of an actor call, which Ray leaves untyped."""
    result = await cast(Awaitable[object], reply)
    assert isinstance(result, kind), f"expected {kind}, got {result!r}"
    return result


def _is_node_alive(node_id: str) -> bool:
    return any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())
