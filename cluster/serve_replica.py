"""One replica under Ray Serve: Serve decides that it is, this keeps it alive and lets it go.

    Serve creates ─► placed by Serve ─► supervisor starts the ranks in that place ─► serving
    Serve stops   ─► no new leases ─► streams end or move ─► ranks end ─► gone

Serve passes no requests through it: gateways stream from the ranks' leader directly. Where a rank
dies, the supervisor rebuilds all of them here; where that goes on failing, Serve is told.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable
from dataclasses import replace
from typing import cast

from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import get_current_placement_group
from rich.console import Console

from .controller_notices import RayControllerNotices
from .replica import RayReplica, ReplicaSpec
from .security import stream_tls_from
from .serve import worker_config
from .serve_args import ModelArgs, ServeArgs
from .serve_command import resolve_models
from .serve_controller import shared_controller
from .supervisor import Supervisor
from .tls import NO_INNER_TLS, InnerTlsFiles

logger = logging.getLogger(__name__)

_UNHEALTHY_S = 600.0  # rebuilt in vain for so long: Serve shall try elsewhere
_ASK_S = 1.0
STOP_MARGIN_S = 30.0  # beyond the time of its streams, for its processes to end


class ServeReplica:
    """Made a deployment by `serve_app`; one for each model."""

    async def __init__(self, model: ModelArgs, args: ServeArgs) -> None:
        context = serve.get_replica_context()
        self._args = args
        self._controller = cast("ActorHandle[object]", shared_controller(context.app_name, args))
        # a model may have to be fetched first
        self._spec = await asyncio.to_thread(
            replica_spec, model, context.replica_id.unique_id, args.inner_tls
        )
        placement = get_current_placement_group()
        assert placement is not None, "Serve places the ranks"
        self._supervisor = Supervisor(
            [self._spec],
            lambda spec: RayReplica(spec, self._controller, placement),
            RayControllerNotices(self._controller),
        )
        self._served_at = time.monotonic()
        try:
            await self._supervisor.start()
        except BaseException:
            await self._supervisor.stop()
            raise

    async def check_health(self) -> None:
        """Called by Serve; an exception makes it replace this replica."""
        if self._supervisor.infos():
            self._served_at = time.monotonic()
        elif not self._supervisor.num_kept:
            raise RuntimeError(f"{self._spec.replica_id} was drained and has ended")
        elif time.monotonic() - self._served_at > _UNHEALTHY_S:
            raise RuntimeError(f"{self._spec.replica_id} cannot be rebuilt here")

    async def __del__(self) -> None:
        """Called by Serve when this replica has to go: let its streams end or move first."""
        stopping = asyncio.create_task(self._supervisor.stop(self._args.max_stream_s))
        while not stopping.done():
            await asyncio.wait({stopping}, timeout=_ASK_S)
            if not stopping.done() and await self._can_move():
                await self._supervisor.drain(self._spec.replica_id, self._args.drain_s)
                break
        await stopping

    async def _can_move(self) -> bool:
        """Whether another replica could go on with the streams."""
        with contextlib.suppress(RayError):
            reply = self._controller.can_move.remote(self._spec.replica_id)
            return await cast(Awaitable[bool], reply)
        return False


def replica_spec(
    model: ModelArgs, unique_id: str, inner_tls: InnerTlsFiles = NO_INNER_TLS
) -> ReplicaSpec:
    """A replica of the model, of an id that none had before; the default model is fetched."""
    resolved = resolve_models(model.cluster_config(), Console(stderr=True))
    config = worker_config(resolved, max(1, int(model.num_cpus)), on_gpu=model.num_gpus > 0)
    config = replace(
        config,
        weights_version=model.weights_version,
        stream_tls=stream_tls_from(inner_tls),
    )
    return ReplicaSpec(
        f"{model.name}-{unique_id}",
        model.name,
        config,
        model.num_cpus,
        model.num_gpus,
        num_ranks=model.tp,
    )
