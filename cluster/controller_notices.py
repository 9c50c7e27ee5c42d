"""What a supervisor asks of, and tells, the controller; over Ray, and as tests stand in for it."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import asyncio
import contextlib
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from ..protos.messages import ClusterState, ReplicaInfo, ReplicaState, WantedWeights

T = TypeVar("T")

_CALL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ControllerView:
    """What the controller says of incarnations.

    dead: declared so lately. known: those that report. draining: those of them that
    are to go, and not to come again with other weights.
    """

    dead: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    draining: frozenset[str] = frozenset()


class ControllerNotices(Protocol):
    """What a supervisor asks of, and tells, the controller."""

    async def look(self) -> ControllerView | None:
        """Its view; None while it restarts. TimeoutError where it does not answer at all."""
        ...

    async def end_controller(self) -> None:
        """End its process, which is frozen, so that another begins."""
        ...

    async def wanted_weights(self, model: str) -> WantedWeights | None:
        """What a replica of the model is to load instead of what it was made for; None = no
        other, or the controller is away.
        """
        ...

    async def replica_wanted(self, replica_id: str) -> None:
        """A replica of this id will serve, whatever became of an earlier one."""
        ...

    async def replica_draining(self, info: ReplicaInfo, drain_s: float) -> None:
        """This incarnation is to get no new requests, and its streams move after `drain_s`."""
        ...

    async def replica_gone(self, info: ReplicaInfo) -> None:
        """This incarnation serves no more."""
        ...


class RayControllerNotices:
    """The controller behind its actor handle; silent while it restarts."""

    def __init__(self, controller: "ActorHandle[object]") -> None:
        self._controller = controller

    async def look(self) -> ControllerView | None:
        """See ControllerNotices."""
        try:
            state = await _answer(ClusterState, self._controller.cluster_state.remote())
            dead = await _answer(tuple, self._controller.dead_replicas.remote())
        except RayError:
            return None
        replicas = state.replicas
        draining = [
            status
            for status in replicas
            if status.state is ReplicaState.DRAINING and not status.renews
        ]
        return ControllerView(
            frozenset(info.incarnation for info in cast("tuple[ReplicaInfo, ...]", dead)),
            frozenset(status.incarnation for status in replicas),
            frozenset(status.incarnation for status in draining),
        )

    async def end_controller(self) -> None:
        """See ControllerNotices."""
        # Unlike an actor's own exit, this reaches a stopped process too: after 5 s by its raylet.
        ray.kill(self._controller, no_restart=False)

    async def wanted_weights(self, model: str) -> WantedWeights | None:
        """See ControllerNotices."""
        with contextlib.suppress(RayError, TimeoutError):
            reply = cast(
                "Awaitable[WantedWeights | None]", self._controller.wanted_weights.remote(model)
            )
            return await asyncio.wait_for(reply, _CALL_TIMEOUT_S)
        return None

    async def replica_wanted(self, replica_id: str) -> None:
        """See ControllerNotices."""
        await self._tell(self._controller.drain.remote(replica_id, False))

    async def replica_draining(self, info: ReplicaInfo, drain_s: float) -> None:
        """See ControllerNotices."""
        await self._tell(self._controller.drain.remote(info.replica_id, True, drain_s))

    async def replica_gone(self, info: ReplicaInfo) -> None:
        """See ControllerNotices."""
        await self._tell(self._controller.declare_dead.remote(info.replica_id))

    async def _tell(self, reply: object) -> None:
        with contextlib.suppress(RayError, TimeoutError):
            await asyncio.wait_for(cast(Awaitable[object], reply), _CALL_TIMEOUT_S)


async def _answer(kind: type[T], reply: object) -> T:
    answer = await asyncio.wait_for(cast(Awaitable[object], reply), _CALL_TIMEOUT_S)
    assert isinstance(answer, kind), f"expected {kind}, got {answer!r}"
    return answer
