"""The gateway as a Ray actor: its servers run in the actor's own event loop.

Ray starts and ends it; clients never meet Ray. It takes no CPU of its own in Ray's books.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import secrets
from typing import cast

import ray
from ray.actor import ActorHandle

from .controller_client import RayControllerClient
from .gateway import Gateway
from .gateway_servers import GatewayAddresses, GatewayServers
from .ray_runtime import on_this_node
from .request_log import write_logs_as_json
from .security import GatewaySecurity

__all__ = ["GatewayActor", "GatewayAddresses", "start_gateway"]

_STOP_GRACE_S = 10.0


class GatewayActor:
    """One gateway; made an actor by `start_gateway`."""

    def __init__(
        self, controller: ActorHandle[object], security: GatewaySecurity | None = None
    ) -> None:
        write_logs_as_json()
        self._security = security
        # A new id in each life: leases and streams of the last one are not its own.
        gateway_id = f"gateway-{secrets.token_hex(8)}"
        self._controller = RayControllerClient(controller)
        self._gateway_id = gateway_id
        self._servers: GatewayServers | None = None

    async def start(self, host: str, grpc_port: int, http_port: int) -> GatewayAddresses:
        """Listen for clients; OSError if a port is taken."""
        # made here: gRPC's servers belong to the loop they are made in
        servers = GatewayServers(Gateway(self._gateway_id, self._controller), self._security)
        addresses = await servers.start(host, grpc_port, http_port)
        self._servers = servers
        return addresses

    async def num_running(self) -> int:
        """Requests that have not ended."""
        return 0 if self._servers is None else self._servers.num_running

    async def stop(self, grace_s: float = _STOP_GRACE_S) -> None:
        """Take no new calls, let running ones end, close."""
        servers, self._servers = self._servers, None
        if servers is not None:
            await servers.stop(grace_s)


def start_gateway(
    controller: ActorHandle[object],
    *,
    security: GatewaySecurity | None = None,
    name: str | None = None,
    namespace: str | None = None,
) -> ActorHandle[object]:
    """Create the actor. It is not restarted by itself: its ports would be others."""
    actor = ray.remote(
        num_cpus=0,
        max_restarts=0,
        max_task_retries=0,
    )(GatewayActor)
    options = actor.options(
        name=name,
        namespace=namespace,
        scheduling_strategy=on_this_node(soft=False),  # clients are told this node's address
    )
    return cast("ActorHandle[object]", options.remote(controller, security))
