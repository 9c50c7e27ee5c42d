"""A gateway with both its fronts listening, started and ended as one. Knows no Ray."""

import asyncio
import itertools
import os

from ..workers.heartbeat import Pulse, heartbeat_from_environment
from .gateway import Gateway
from .gateway_addresses import GatewayAddresses
from .grpc_server import GrpcServer
from .http_server import HttpServer
from .openai_api import make_app
from .security import GatewaySecurity

_READINESS_S = 0.2


class GatewayServers:
    """Lives on the loop that calls `start`."""

    def __init__(self, gateway: Gateway, security: GatewaySecurity | None = None) -> None:
        """Raises KeysError and TlsError."""
        security = security or GatewaySecurity()
        access = security.access()
        self._gateway = gateway
        self._grpc = GrpcServer(gateway, access, security.tls)
        self._http = HttpServer(make_app(gateway, access), security.tls)
        self._readiness: asyncio.Task[None] | None = None
        self._heartbeats: asyncio.Task[None] | None = None
        self._num_beats = itertools.count()

    @property
    def num_running(self) -> int:
        """Requests that have not ended."""
        return self._gateway.num_running

    async def start(self, host: str, grpc_port: int, http_port: int) -> GatewayAddresses:
        """Listen on both ports (0 = any free one). OSError if one is taken; then none is open."""
        try:
            bound_http = await self._http.start(host, http_port)
            bound_grpc = await self._grpc.start(host, grpc_port)
        except OSError:
            await asyncio.gather(self._grpc.stop(0), self._http.stop(0))
            raise
        await self._gateway.start()
        self._readiness = asyncio.create_task(self._follow_readiness())
        heartbeat = heartbeat_from_environment(f"gateway-{os.getpid()}")
        if heartbeat is not None:
            self._heartbeats = asyncio.create_task(heartbeat.run(self._pulse))
        shown = f"[{host}]" if ":" in host else host
        return GatewayAddresses(f"{shown}:{bound_grpc}", f"{shown}:{bound_http}")

    async def stop(self, grace_s: float) -> None:
        """NOT_SERVING and no new calls at once; running ones have `grace_s` to end."""
        if self._readiness is not None:
            self._readiness.cancel()
            await asyncio.gather(self._readiness, return_exceptions=True)
            self._readiness = None
        self._gateway.end_watches()  # else they would use up the grace time
        await asyncio.gather(self._grpc.stop(grace_s), self._http.stop(grace_s))
        await self._gateway.close()
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            await asyncio.gather(self._heartbeats, return_exceptions=True)

    def _pulse(self) -> Pulse:
        """Its loop turning is all the progress it owes: requests may wait for blocks for long."""
        takes_requests = self._readiness is not None and self._gateway.is_ready
        return Pulse(next(self._num_beats), self.num_running, is_ready=takes_requests)

    async def _follow_readiness(self) -> None:
        """The health service says what the gateway can do."""
        was_ready = False
        while True:
            if self._gateway.is_ready != was_ready:
                was_ready = self._gateway.is_ready
                await self._grpc.set_serving(was_ready)
            await asyncio.sleep(_READINESS_S)
