"""Starting one replica's processes on Ray, and ending them for certain.

Knows placement, actors and processes; nothing of requests, and nothing of how many replicas
there should be.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

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
from ..workers.process_identity import ProcessIdentity, kill_for_certain
from ..workers.worker import Worker, worker_environment

T = TypeVar("T")

_PLACEMENT_TIMEOUT_S = 60.0
_KILL_TIMEOUT_S = 20.0
_CALLS_AT_ONCE = 8  # `Worker.join` and a long `drain` each hold one


class ReplicaFailed(Exception):
    """A replica could not be started, or its node cannot be reached to end it."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What a replica is, over all its incarnations.

    model: the name that clients know it by; what is loaded stands in `config`.
    num_cpus, num_gpus: what each rank takes of its node.
    """

    replica_id: str
    model: str
    config: WorkerConfig
    num_cpus: float = 1.0
    num_gpus: float = 0.0


class Replica(Protocol):
    """One incarnation, from its creation to its certain end."""

    @property
    def process(self) -> ProcessIdentity | None:
        """Its leader's process; None before that has begun and once it is gone."""
        ...

    async def start(self) -> ReplicaInfo:
        """Place, load, serve, register. Raises ReplicaFailed."""
        ...

    async def wait_ended(self) -> str:
        """Return, with the reason, once it serves no more."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Let its streams finish; False if some are left."""
        ...

    async def kill(self) -> None:
        """End its processes and free what they held; returns when they are gone."""
        ...


class RayReplica:
    """A replica of one rank: a placement group and a Worker in it."""

    def __init__(self, spec: ReplicaSpec, controller: "ActorHandle[object]") -> None:
        self._spec = spec
        self._controller = controller
        self._placement: PlacementGroup | None = None
        self._worker: ActorHandle[object] | None = None
        self._process: ProcessIdentity | None = None

    @property
    def process(self) -> ProcessIdentity | None:
        """See Replica."""
        return self._process

    async def start(self) -> ReplicaInfo:
        """See Replica."""
        self._placement = await self._place()
        self._worker = worker = self._create_worker(self._placement)
        try:
            self._process = await _result(ProcessIdentity, worker.identify.remote())
            return await _result(ReplicaInfo, worker.start.remote())
        except RayTaskError as error:
            raise ReplicaFailed(f"{self._spec.replica_id}: {error.cause}") from error
        except RayError as error:
            raise ReplicaFailed(f"{self._spec.replica_id}: {error}") from error

    async def wait_ended(self) -> str:
        """See Replica."""
        assert self._worker is not None, "start() comes first"
        try:
            return await _result(str, self._worker.join.remote())
        except RayError as error:
            return f"its process is lost: {type(error).__name__}"

    async def drain(self, timeout_s: float) -> bool:
        """See Replica."""
        assert self._worker is not None, "start() comes first"
        try:
            return await _result(bool, self._worker.drain.remote(timeout_s))
        except RayError:
            return True  # nothing is left to wait for

    async def kill(self) -> None:
        """See Replica."""
        if self._worker is not None:
            ray.kill(self._worker, no_restart=True)
        if self._process is not None:
            await self._kill_process(self._process)
        if self._placement is not None:
            remove_placement_group(self._placement)
        self._worker = self._process = self._placement = None

    async def _place(self) -> PlacementGroup:
        bundle = {"CPU": self._spec.num_cpus, "GPU": self._spec.num_gpus}
        group = placement_group(
            [{name: amount for name, amount in bundle.items() if amount > 0}],
            strategy="STRICT_PACK",
        )
        try:
            await asyncio.wait_for(group.ready(), _PLACEMENT_TIMEOUT_S)
        except TimeoutError:
            remove_placement_group(group)
            raise ReplicaFailed(
                f"{self._spec.replica_id}: no node has {self._spec.num_cpus:g} CPUs and "
                f"{self._spec.num_gpus:g} GPUs free"
            ) from None
        return group

    def _create_worker(self, placement: PlacementGroup) -> "ActorHandle[object]":
        num_threads = self._spec.config.num_threads or max(1, int(self._spec.num_cpus))
        options = ray.remote(Worker).options(
            num_cpus=self._spec.num_cpus,
            num_gpus=self._spec.num_gpus,
            max_restarts=0,
            max_task_retries=0,  # Ray would run a call twice and splice the results
            max_concurrency=_CALLS_AT_ONCE,
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement, 0),
            runtime_env={"env_vars": worker_environment(num_threads)},
        )
        spec = self._spec
        handle = options.remote(spec.replica_id, spec.model, spec.config, self._controller)
        return cast("ActorHandle[object]", handle)

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


async def _result(kind: type[T], reply: object) -> T:
    """The answer of an actor call, which Ray leaves untyped."""
    result = await cast(Awaitable[object], reply)
    assert isinstance(result, kind), f"expected {kind}, got {result!r}"
    return result


def _is_node_alive(node_id: str) -> bool:
    return any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())
