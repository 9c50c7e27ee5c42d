"""The supervisor, and the keeper of its node's gateway, as one Ray actor."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Sequence
from typing import cast

import ray
from ray.actor import ActorHandle

from ..protos.messages import ReplicaInfo
from ..workers.process_identity import ProcessIdentity
from .controller_notices import RayControllerNotices
from .draining import DRAIN_S
from .gateway_addresses import GatewayAddresses
from .gateway_keeper import GatewayKeeper, RayGateway
from .gateway_spec import GatewaySpec
from .ray_runtime import on_this_node
from .replica import RayReplica, Replica, ReplicaSpec
from .supervisor import Supervisor


class SupervisorActor:
    """The supervisor as a Ray actor; what it started ends with it."""

    def __init__(
        self,
        specs: Sequence[ReplicaSpec],
        controller: "ActorHandle[object]",
        gateway: GatewaySpec | None = None,
    ) -> None:
        def create(spec: ReplicaSpec) -> Replica:
            return RayReplica(spec, controller)

        self._supervisor = Supervisor(specs, create, RayControllerNotices(controller))
        self._gateway: RayGateway | None = None
        self._keeper = None if gateway is None else GatewayKeeper(gateway, self._create_gateway)
        self._controller = controller

    def _create_gateway(self, spec: GatewaySpec) -> RayGateway:
        self._gateway = RayGateway(spec, self._controller)
        return self._gateway

    async def open_gateway(self) -> GatewayAddresses:
        """Listen for clients, from now on at these addresses; raises GatewayLost if it cannot."""
        assert self._keeper is not None, "no gateway was ordered"
        return await self._keeper.start()

    async def gateway(self) -> "ActorHandle[object] | None":
        """The gateway's actor of now; None while there is none."""
        return (
            self._gateway.actor if self._gateway and self._keeper and self._keeper.current else None
        )

    async def close_gateway(self, grace_s: float) -> None:
        """Take no new calls, let running ones end, and keep it no more."""
        if self._keeper is not None:
            await self._keeper.stop(grace_s)

    async def start(self) -> tuple[ReplicaInfo, ...]:
        """Start every replica; raises ReplicaFailed if one cannot be started."""
        return await self._supervisor.start()

    async def add(self, spec: ReplicaSpec) -> ReplicaInfo:
        """Start one more replica; raises ReplicaFailed."""
        return await self._supervisor.add(spec)

    async def drain(self, replica_id: str, drain_s: float = DRAIN_S) -> bool:
        """Let a replica go once its streams have ended or moved; False if there is none."""
        return await self._supervisor.drain(replica_id, drain_s)

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
    specs: Sequence[ReplicaSpec],
    controller: "ActorHandle[object]",
    gateway: GatewaySpec | None = None,
) -> "ActorHandle[object]":
    """The supervisor's actor, to be started with its `start`, its gateway with `open_gateway`."""
    actor = ray.remote(SupervisorActor).options(
        num_cpus=0,
        max_restarts=0,
        max_task_retries=0,
        enable_task_events=False,
        scheduling_strategy=on_this_node(soft=False),  # what it started ends with it
    )
    return cast("ActorHandle[object]", actor.remote(list(specs), controller, gateway))
