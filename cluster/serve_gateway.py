"""A gateway under Ray Serve: one on each of its nodes, on the same ports of each.

    Serve creates ─► a gateway's actor on this node ─► NOT_SERVING ─► a model can be asked: SERVING
    Serve stops   ─► no new calls ─► gone; the actor stays behind until its streams have ended

Clients reach the gateway's own servers, not Serve's proxy. That actor outlives this replica, so
that a successor can take the ports at once, however long the streams are. What Serve's controller
needs to know of the demand for blocks goes out with this replica's statistics.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayError
from starlette.requests import Request

from .autoscaling import BlockDemand, to_stats
from .gateway_keeper import GatewayKeeper, RayGateway
from .gateway_spec import GatewaySpec, OnDemand
from .security import GatewaySecurity, security_from
from .serve_args import ServeArgs
from .serve_controller import shared_controller

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_CALL_TIMEOUT_S = 5.0
_ORPHAN_S = 20.0
_BIND_TIMEOUT_S = 60.0
_UNHEALTHY_S = 120.0


class ServeGateway:
    """Made a deployment by `serve_app`."""

    async def __init__(self, args: ServeArgs, replicas: Sequence[object]) -> None:
        del replicas  # bound to this one so that Serve deploys them too
        self._args = args
        self._controller = cast(
            "ActorHandle[object]", shared_controller(serve.get_replica_context().app_name, args)
        )
        self._startup_s = {model.name: model.startup_s for model in args.models}
        # Complete and of the right types from the start: Serve looks at the first one only.
        self._demands = {model: BlockDemand() for model in self._startup_s}
        self._keeper = GatewayKeeper(
            gateway_spec(args), lambda spec: RayGateway(spec, self._controller)
        )
        self._addresses = await self._keeper.start()
        self._listened_at = time.monotonic()
        self._following = asyncio.create_task(self._follow_demand())

    async def __call__(self, request: Request) -> dict[str, str]:
        """Through Serve's own HTTP proxy: where the gateway of that node really is."""
        return {"grpc": self._addresses.grpc, "http": self._addresses.http}

    async def check_health(self) -> None:
        """Called by Serve: an exception makes it replace this replica."""
        if self._following.done():
            raise RuntimeError("the demand for blocks is followed no more")
        if self._keeper.is_listening:
            self._listened_at = time.monotonic()
        elif time.monotonic() - self._listened_at > _UNHEALTHY_S:
            raise RuntimeError("the gateway cannot be started again here")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve twice a second."""
        return to_stats(self._demands)

    async def __del__(self) -> None:
        """Called by Serve when this replica has to go."""
        self._following.cancel()
        await self._keeper.retire(self._args.max_stream_s)

    async def _follow_demand(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_CALL_TIMEOUT_S):
                    reply = self._controller.block_demands.remote(self._startup_s)
                    demands = await cast(Awaitable[dict[str, BlockDemand]], reply)
                self._demands = with_held(demands, self._keeper.held)
            except (RayError, TimeoutError) as error:
                logger.warning("the controller did not tell the demand: %s", type(error).__name__)
            await asyncio.sleep(_POLL_S)


def with_held(demands: dict[str, BlockDemand], held: dict[str, int]) -> dict[str, BlockDemand]:
    """The controller's count, and the requests that it cannot know of yet."""
    return {
        model: replace(demand, num_requests=demand.num_requests + held.get(model, 0))
        for model, demand in demands.items()
    }


def gateway_spec(args: ServeArgs) -> GatewaySpec:
    """What each gateway is. Keys may also come from its node's environment."""
    on_demand = tuple(model.name for model in args.models if model.min_replicas == 0)
    return GatewaySpec(
        args.host,
        args.grpc_port,
        args.http_port,
        _security(args),
        OnDemand(on_demand, args.hold_s),
        bind_timeout_s=_BIND_TIMEOUT_S,
        orphan_s=_ORPHAN_S,
        retire_s=args.max_stream_s,
    )


def _security(args: ServeArgs) -> GatewaySecurity:
    return security_from(
        os.environ,
        api_key_file=_path(args.api_key_file),
        tls_cert=_path(args.tls_cert),
        tls_key=_path(args.tls_key),
        tls_client_ca=_path(args.tls_client_ca),
        inner_tls=args.inner_tls,
    )


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
