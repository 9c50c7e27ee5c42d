"""Keeping a cluster's replicas alive: each one that ends, or is declared dead, begins again.

Knows replicas as things that start, end and can be killed. Knows nothing of requests; the
controller, which never creates anything, is asked only whom it has declared dead.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Protocol, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from ..protos.messages import ReplicaInfo
from ..workers.process_identity import ProcessIdentity
from .replica import RayReplica, Replica, ReplicaFailed, ReplicaSpec

logger = logging.getLogger(__name__)


_MAX_REMEMBERED_DEAD = 1000  # one may be declared dead before its start has returned


class ControllerNotices(Protocol):
    """What a supervisor asks of, and tells, the controller."""

    async def take_dead(self) -> frozenset[str]:
        """Incarnations declared dead since the last call."""
        ...

    async def replica_draining(self, info: ReplicaInfo) -> None:
        """This incarnation is to get no new requests."""
        ...

    async def replica_gone(self, info: ReplicaInfo) -> None:
        """This incarnation serves no more."""
        ...


class _Keeper:
    """One replica over its incarnations. `info` stands only while one serves."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self.spec = spec
        self.replica: Replica | None = None
        self.info: ReplicaInfo | None = None
        self.declared_dead = asyncio.Event()
        self.first_start: asyncio.Future[ReplicaInfo] = asyncio.get_running_loop().create_future()


class Supervisor:
    """Keeps each replica running until `stop`. Lives on one asyncio loop.

    Args:
        create: makes one incarnation of a replica, not started.
        poll_s: how often the controller is asked for the dead.
        backoff_s: pause after a failed start; doubles up to `max_backoff_s`.
    """

    def __init__(
        self,
        specs: Sequence[ReplicaSpec],
        create: Callable[[ReplicaSpec], Replica],
        notices: ControllerNotices,
        *,
        poll_s: float = 1.0,
        backoff_s: float = 1.0,
        max_backoff_s: float = 30.0,
        start_timeout_s: float = 1800.0,
    ) -> None:
        self._specs = tuple(specs)
        self._create = create
        self._notices = notices
        self._poll_s = poll_s
        self._backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._start_timeout_s = start_timeout_s
        self._dead: dict[str, None] = {}  # incarnations, oldest first
        self._keepers: list[_Keeper] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.num_restarts = 0

    async def start(self) -> tuple[ReplicaInfo, ...]:
        """Start every replica; raises ReplicaFailed if one cannot be started at first."""
        self._keepers = [_Keeper(spec) for spec in self._specs]
        self._tasks = [asyncio.create_task(self._keep(keeper)) for keeper in self._keepers]
        self._tasks.append(asyncio.create_task(self._watch_for_dead()))
        return tuple(await asyncio.gather(*(keeper.first_start for keeper in self._keepers)))

    def infos(self) -> tuple[ReplicaInfo, ...]:
        """The incarnations that serve now."""
        return tuple(keeper.info for keeper in self._keepers if keeper.info is not None)

    def processes(self) -> dict[str, ProcessIdentity]:
        """The leaders' processes of those that serve, by replica id."""
        return {
            keeper.spec.replica_id: keeper.replica.process
            for keeper in self._keepers
            if keeper.info and keeper.replica and keeper.replica.process
        }

    async def stop(self, drain_s: float = 0.0) -> None:
        """Let streams finish for up to `drain_s`, then end every replica for certain."""
        if drain_s > 0.0:
            await asyncio.gather(*(self._drain(keeper, drain_s) for keeper in self._keepers))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _drain(self, keeper: _Keeper, drain_s: float) -> None:
        if keeper.replica is not None and keeper.info is not None:
            await self._notices.replica_draining(keeper.info)
            await keeper.replica.drain(drain_s)

    async def _keep(self, keeper: _Keeper) -> None:
        """One incarnation after the other."""
        backoff_s = self._backoff_s
        while True:
            replica = keeper.replica = self._create(keeper.spec)
            try:
                served = await self._live(keeper, replica)
            finally:
                await _to_the_end(self._bury(keeper, replica))
            if served:
                backoff_s = self._backoff_s
            else:
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, self._max_backoff_s)
            self.num_restarts += 1

    async def _live(self, keeper: _Keeper, replica: Replica) -> bool:
        """One incarnation from start to end; False if it never served."""
        try:
            info = await asyncio.wait_for(replica.start(), self._start_timeout_s)
        except TimeoutError:
            logger.error("replica %s did not start in time", keeper.spec.replica_id)
            return False
        except ReplicaFailed as error:
            logger.error("replica %s did not start: %s", keeper.spec.replica_id, error)
            if not keeper.first_start.done():
                keeper.first_start.set_exception(error)
            return False
        keeper.info = info
        keeper.declared_dead.clear()
        if not keeper.first_start.done():
            keeper.first_start.set_result(info)
        reason = await _first(replica.wait_ended(), self._declared_dead(keeper))
        logger.warning("replica %s ended: %s", keeper.spec.replica_id, reason)
        return True

    async def _declared_dead(self, keeper: _Keeper) -> str:
        await keeper.declared_dead.wait()
        return "declared dead by the controller"

    async def _bury(self, keeper: _Keeper, replica: Replica) -> None:
        """Its device must not be used again before its processes are gone."""
        info, keeper.info = keeper.info, None
        while True:
            try:
                await replica.kill()
                break
            except ReplicaFailed as error:
                logger.error("replica %s cannot be ended: %s", keeper.spec.replica_id, error)
                await asyncio.sleep(self._backoff_s)
        if info is not None:
            await self._notices.replica_gone(info)

    async def _watch_for_dead(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            for incarnation in await self._notices.take_dead():
                self._dead[incarnation] = None
                while len(self._dead) > _MAX_REMEMBERED_DEAD:
                    del self._dead[next(iter(self._dead))]
            for keeper in self._keepers:
                if keeper.info is not None and keeper.info.incarnation in self._dead:
                    keeper.declared_dead.set()


async def _first(*reasons: Coroutine[object, object, str]) -> str:
    """The answer of whichever ends first; the others are cancelled."""
    tasks = [asyncio.create_task(reason) for reason in reasons]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()


async def _to_the_end(work: Coroutine[object, object, None]) -> None:
    """Finish `work` even if the caller is cancelled meanwhile."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


class RayControllerNotices:
    """The controller behind its actor handle; silent while it restarts."""

    def __init__(self, controller: "ActorHandle[object]") -> None:
        self._controller = controller

    async def take_dead(self) -> frozenset[str]:
        """See ControllerNotices."""
        call = self._controller.dead_replicas.remote()
        try:
            dead = await cast(Awaitable[tuple[ReplicaInfo, ...]], call)
        except RayError:
            return frozenset()
        return frozenset(info.incarnation for info in dead)

    async def replica_draining(self, info: ReplicaInfo) -> None:
        """See ControllerNotices."""
        call = self._controller.drain.remote(info.replica_id)
        with contextlib.suppress(RayError):
            await cast(Awaitable[bool], call)

    async def replica_gone(self, info: ReplicaInfo) -> None:
        """See ControllerNotices."""
        call = self._controller.declare_dead.remote(info.replica_id)
        with contextlib.suppress(RayError):
            await cast(Awaitable[None], call)


class SupervisorActor:
    """The supervisor as a Ray actor; what it started ends with it."""

    def __init__(self, specs: Sequence[ReplicaSpec], controller: "ActorHandle[object]") -> None:
        def create(spec: ReplicaSpec) -> Replica:
            return RayReplica(spec, controller)

        self._supervisor = Supervisor(specs, create, RayControllerNotices(controller))

    async def start(self) -> tuple[ReplicaInfo, ...]:
        """Start every replica; raises ReplicaFailed if one cannot be started."""
        return await self._supervisor.start()

    async def infos(self) -> tuple[ReplicaInfo, ...]:
        """The incarnations that serve now."""
        return self._supervisor.infos()

    async def processes(self) -> dict[str, ProcessIdentity]:
        """The leaders' processes of those that serve, by replica id."""
        return self._supervisor.processes()

    async def num_restarts(self) -> int:
        """Incarnations that had to be replaced."""
        return self._supervisor.num_restarts

    async def stop(self, drain_s: float = 0.0) -> None:
        """Let streams finish for up to `drain_s`, then end every replica for certain."""
        await self._supervisor.stop(drain_s)


def create_supervisor(
    specs: Sequence[ReplicaSpec], controller: "ActorHandle[object]"
) -> "ActorHandle[object]":
    """The supervisor's actor, to be started with its `start`."""
    actor = ray.remote(SupervisorActor).options(num_cpus=0, max_restarts=0, max_task_retries=0)
    return cast("ActorHandle[object]", actor.remote(list(specs), controller))
