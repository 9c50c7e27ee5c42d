"""The gateway as a Ray actor: its servers run in the actor's own event loop.

Ray starts and ends it; clients never meet Ray. It takes no CPU of its own in Ray's books. Who
creates the actor imports this file: all that serves is imported where its own process starts it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import asyncio
import secrets
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, cast

import ray
from ray.actor import ActorHandle

from ..workers.json_log import write_logs_as_json
from ..workers.process_identity import ProcessIdentity, this_process
from ..workers.tracing import tracing_from_environment
from .controller_client import RayControllerClient
from .gateway_addresses import GatewayAddresses
from .gateway_spec import GatewaySpec
from .ray_runtime import on_this_node

if TYPE_CHECKING:
    from .gateway import Gateway
    from .gateway_servers import GatewayServers

_STOP_GRACE_S = 10.0
_BIND_PAUSE_S = 0.1
_ORPHAN_CHECK_S = 1.0


class GatewayActor:
    """One gateway; made an actor by `start_gateway`."""

    def __init__(self, controller: ActorHandle[object], spec: GatewaySpec) -> None:
        write_logs_as_json()
        self._spec = spec
        # A new id in each life: leases and streams of the last one are not its own.
        gateway_id = f"gateway-{secrets.token_hex(8)}"
        self._controller = RayControllerClient(controller)
        self._gateway_id = gateway_id
        self._tracing = tracing_from_environment("gateway", gateway_id)
        self._gateway: Gateway | None = None
        self._servers: GatewayServers | None = None
        self._pinged_at = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()

    async def identify(self) -> ProcessIdentity:
        """The process to end when this gateway must be gone for certain."""
        return this_process(ray.get_runtime_context().get_node_id())

    async def start(self) -> GatewayAddresses:
        """Listen for clients; OSError if a port stays taken."""
        deadline = time.monotonic() + self._spec.bind_timeout_s
        while True:
            try:
                addresses = await self._listen()
                break
            except OSError:
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(_BIND_PAUSE_S)
        if self._spec.orphan_s is not None:
            self._spawn(self._watch_creator(self._spec.orphan_s))
        return addresses

    async def ping(self) -> dict[str, int]:
        """It lives, and its creator does; answers how many requests wait for which first replica
        without the controller's knowledge.
        """
        self._pinged_at = time.monotonic()
        return {} if self._gateway is None else self._gateway.held

    async def num_running(self) -> int:
        """Requests that have not ended."""
        return 0 if self._servers is None else self._servers.num_running

    async def stop(self, grace_s: float = _STOP_GRACE_S) -> None:
        """Take no new calls, let running ones end, close."""
        servers, self._servers = self._servers, None
        if servers is not None:
            await servers.stop(grace_s)

    async def retire(self, grace_s: float) -> None:
        """The same, and then the process ends itself; answers as soon as no new calls come in."""
        closing = self._spawn(self._stop_and_end(grace_s))
        await asyncio.wait({closing}, timeout=_BIND_PAUSE_S)

    async def _listen(self) -> GatewayAddresses:
        from .engine_client import insecure_channel, secure_channels
        from .gateway import Gateway
        from .gateway_servers import GatewayServers
        from .ray_metrics import start_export

        security = self._spec.security
        inner_tls = None if security is None else security.streams
        # made here: gRPC's servers belong to the loop they are made in
        gateway = Gateway(
            self._gateway_id,
            self._controller,
            tracing=self._tracing,
            on_demand=self._spec.on_demand,
            make_channel=secure_channels(inner_tls) if inner_tls else insecure_channel,
        )
        servers = GatewayServers(gateway, security)
        spec = self._spec
        addresses = await servers.start(spec.host, spec.grpc_port, spec.http_port)
        self._gateway, self._servers = gateway, servers
        start_export(gateway.metrics.families)
        return addresses

    async def _watch_creator(self, orphan_s: float) -> None:
        while time.monotonic() - self._pinged_at < orphan_s:
            await asyncio.sleep(_ORPHAN_CHECK_S)
        await self._stop_and_end(self._spec.retire_s)

    async def _stop_and_end(self, grace_s: float) -> None:
        await self.stop(grace_s)
        ray.kill(ray.get_runtime_context().current_actor)

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def start_gateway(controller: ActorHandle[object], spec: GatewaySpec) -> ActorHandle[object]:
    """Create the actor. Ray does not restart it: who keeps it does, on the same ports."""
    outlives = spec.orphan_s is not None
    options = ray.remote(GatewayActor).options(
        num_cpus=0,
        max_restarts=0,
        max_task_retries=0,
        enable_task_events=False,
        name=f"gateway-{secrets.token_hex(8)}" if outlives else None,
        lifetime="detached" if outlives else None,
        scheduling_strategy=on_this_node(soft=False),  # clients are told this node's address
    )
    return cast("ActorHandle[object]", options.remote(controller, spec))
