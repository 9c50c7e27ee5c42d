"""How a gateway reaches the controller: the protocol, and the one over a Ray actor handle.

Whatever becomes of the controller, callers see only the error tree: a controller that is dead or
restarting is `Unavailable`, with a hint when to ask again.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from collections.abc import Awaitable
from typing import Protocol, TypeVar, cast

from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from ..protos.errors import InternalError, PagefleetError, Unavailable
from ..protos.messages import (
    CacheReset,
    ClusterState,
    ClusterView,
    Explanation,
    Lease,
    ModelCard,
    Refused,
    ReserveRequest,
    Ticket,
)
from .draining import DRAIN_S

_CONTROLLER_RESTART_S = 1.0

T = TypeVar("T")


class ControllerClient(Protocol):
    """What a gateway needs of the controller."""

    async def reserve(self, request: ReserveRequest) -> Lease | Ticket | Refused:
        """Route and reserve; idempotent by (request_key, attempt)."""
        ...

    async def next_grants(self, gateway_id: str) -> tuple[Lease | Refused, ...]:
        """What became of tickets; waits for it, at most 10 s."""
        ...

    async def release(self, request_key: str, attempt: int) -> None:
        """The lease or ticket is no longer needed."""
        ...

    async def model_cards(self) -> tuple[ModelCard, ...]:
        """The models that have a replica."""
        ...

    async def replica_failed(self, replica_id: str, incarnation: str) -> None:
        """A hint: the stream to this replica broke, or it refused one."""
        ...

    async def cluster_state(self) -> ClusterState:
        """Every replica and the queue."""
        ...

    async def watch(self) -> ClusterView:
        """All that a dashboard shows."""
        ...

    async def drain(self, replica_id: str, draining: bool = True, drain_s: float = DRAIN_S) -> bool:
        """Take a replica out once its streams have ended or moved; False if it is not known."""
        ...

    async def reset_prefix_cache(self, model: str) -> tuple[CacheReset, ...]:
        """Every replica (of the model, if one is named) has forgotten what it had cached."""
        ...

    async def update_weights(self, model: str, checkpoint: str, drain_s: float) -> int:
        """New weights for the model, one replica after the other; their version."""
        ...

    async def explain(self, request: ReserveRequest) -> Explanation | Refused:
        """What `reserve` would do, and why; nothing changes."""
        ...


class RayControllerClient:
    """A `ControllerClient` over the controller's actor handle."""

    def __init__(self, controller: ActorHandle[object]) -> None:
        self._controller = controller

    async def reserve(self, request: ReserveRequest) -> Lease | Ticket | Refused:
        return await self._call(self._controller.reserve.remote(request))

    async def next_grants(self, gateway_id: str) -> tuple[Lease | Refused, ...]:
        return await self._call(self._controller.next_grants.remote(gateway_id))

    async def release(self, request_key: str, attempt: int) -> None:
        await self._call(self._controller.release.remote(request_key, attempt))

    async def model_cards(self) -> tuple[ModelCard, ...]:
        return await self._call(self._controller.model_cards.remote())

    async def replica_failed(self, replica_id: str, incarnation: str) -> None:
        await self._call(self._controller.replica_failed.remote(replica_id, incarnation))

    async def cluster_state(self) -> ClusterState:
        return await self._call(self._controller.cluster_state.remote())

    async def watch(self) -> ClusterView:
        return await self._call(self._controller.watch.remote())

    async def drain(self, replica_id: str, draining: bool = True, drain_s: float = DRAIN_S) -> bool:
        return await self._call(self._controller.drain.remote(replica_id, draining, drain_s))

    async def reset_prefix_cache(self, model: str) -> tuple[CacheReset, ...]:
        return await self._call(self._controller.reset_prefix_cache.remote(model))

    async def update_weights(self, model: str, checkpoint: str, drain_s: float) -> int:
        return await self._call(self._controller.update_weights.remote(model, checkpoint, drain_s))

    async def explain(self, request: ReserveRequest) -> Explanation | Refused:
        return await self._call(self._controller.explain.remote(request))

    async def _call(self, reply: object) -> T:  # pyright: ignore[reportInvalidTypeVarUse]
        try:
            return await cast(Awaitable[T], reply)
        except RayTaskError as error:  # the method raised
            cause = cast(object, error.cause)
            if isinstance(cause, PagefleetError):
                raise cause from error
            raise InternalError("the controller failed on this request") from error
        except RayError as error:  # the call did not reach it, or its answer did not reach us
            problem = "the controller is restarting"
            raise Unavailable(problem, retry_after_s=_CONTROLLER_RESTART_S) from error
