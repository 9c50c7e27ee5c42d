"""The Ray actor of a replica's rank 0. Turns actor calls into calls of the leader.

Knows Ray and the controller's handle; the replica itself is in `leader`. Whoever creates the
actor sets `worker_environment` on it: some variables must stand before torch is loaded. It imports
this file too: what needs torch is imported where the actor's own process first needs it.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Awaitable
from typing import TYPE_CHECKING, TypeVar, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from ..protos.messages import ModelCard, ReplicaInfo, ReplicaReport, ReportReply
from .config import WorkerConfig
from .controller_link import ControllerUnreachable
from .json_log import write_logs_as_json
from .openmp import WAITS
from .process_identity import ProcessIdentity, this_process
from .rank_spec import RankSpec
from .replica_end import ReplicaEnd
from .tracing import tracing_from_environment

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from ..scheduler.stats import SchedulerStats
    from .block_staging import BlockBatch
    from .block_storage import BlockStorage
    from .leader import Leader
    from .prefix_mover import ExportGrant, ExportRequest, PrefixOffer

T = TypeVar("T")

_CALL_TIMEOUT_S = 2.0  # one lost call must not look like a dead replica: the watchdog waits 5 s


def worker_environment(num_threads: int) -> dict[str, str]:
    """What must be set before the first import of torch in a worker's process."""
    return {
        **WAITS,
        "OMP_NUM_THREADS": str(num_threads),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


class RayControllerLink:
    """The controller behind its actor handle."""

    def __init__(self, controller: ActorHandle[object], timeout_s: float = _CALL_TIMEOUT_S) -> None:
        self._controller = controller
        self._timeout_s = timeout_s

    async def register_replica(self, info: ReplicaInfo, card: ModelCard) -> ReportReply:
        """See ControllerLink."""
        return await self._call(self._controller.register_replica.remote(info, card))

    async def report(self, report: ReplicaReport) -> ReportReply:
        """See ControllerLink."""
        return await self._call(self._controller.report.remote(report))

    async def _call(self, reply: object) -> ReportReply:
        try:
            return await asyncio.wait_for(cast(Awaitable[ReportReply], reply), self._timeout_s)
        except (RayError, TimeoutError) as error:
            raise ControllerUnreachable(repr(error)) from error


class Worker:
    """Rank 0 of one replica. Needs `max_concurrency` of at least 4: `join` holds one thread."""

    def __init__(
        self, replica_id: str, model: str, config: WorkerConfig, controller: ActorHandle[object]
    ) -> None:
        write_logs_as_json()
        self._replica_id = replica_id
        self._model = model
        self._config = config
        self._link = RayControllerLink(controller)
        self._leader: Leader | None = None
        self._storage: BlockStorage | None = None
        self._spec: RankSpec | None = None
        self._store: TCPStore | None = None

    def identify(self) -> ProcessIdentity:
        """The process to end when this replica must be gone for certain."""
        return this_process(ray.get_runtime_context().get_node_id())

    def open_group(self, name: str, world_size: int) -> RankSpec:
        """Where several ranks share the model: what each must be told, its number apart."""
        from .rendezvous import open_group

        host = ray.util.get_node_ip_address()
        self._spec, self._store = open_group(name, world_size, host, self._config.device)
        return self._spec

    def start(self, asked_at: float | None = None, actors: tuple[str, ...] = ()) -> ReplicaInfo:
        """Load the model, with the other ranks if there are any, serve, register.

        A new incarnation each time. asked_at: see `Leader`. actors: the names of its ranks, the
        leader's first; without them no blocks are exchanged with other replicas.
        """
        from .leader import Leader
        from .loaded_engine import load_engine
        from .ray_transfers import RayTransferLink

        assert self._leader is None, "one actor is one incarnation"
        # Python's 5 ms are several steps of a small model, and tokens would wait that long for
        # the thread that sends them.
        sys.setswitchinterval(0.0005)
        loaded = load_engine(self._config, self._spec, self._store)
        self._storage = loaded.runner.storage
        self._leader = Leader(
            self._replica_id,
            self._model,
            loaded,
            self._link,
            host=ray.util.get_node_ip_address(),
            node_id=ray.get_runtime_context().get_node_id(),
            asked_at=asked_at,
            transfers=RayTransferLink(self._storage, actors) if actors else None,
            actors=actors,
            tracing=tracing_from_environment("engine", self._replica_id),
        )
        # What was loaded lives as long as the process: no collection needs to look at it again.
        gc.collect()
        gc.freeze()
        return self._leader.info

    def join(self) -> ReplicaEnd:
        """Block until this incarnation can serve no more; answers why."""
        leader = self._serving()
        end = leader.wait_ended()
        leader.close(end.reason)
        return end

    def stats(self) -> SchedulerStats:
        """Blocks, queue, leases: the scheduler's numbers now."""
        return self._serving().stats()

    def drain(self, drain_s: float) -> None:
        """Take no new requests; `join` returns once the last has ended or moved."""
        self._serving().drain(drain_s)

    def reset_prefix_cache(self) -> int:
        """Drop every cached block; answers how many there were."""
        return self._serving().reset_prefix_cache()

    def open_export(self, request: ExportRequest) -> ExportGrant | None:
        """Another replica's leader asks for blocks: they stay until `close_export`, or their
        time is up."""
        return self._serving().open_export(request)

    def close_export(self, export_id: int) -> bool:
        """It has read them; whether they were held until now."""
        return self._serving().close_export(export_id)

    def read_shard(self, block_ids: tuple[int, ...]) -> BlockBatch:
        """This rank's part of blocks that are held."""
        from .ray_transfers import read_shard

        assert self._storage is not None, "start() comes first"
        return read_shard(self._storage, block_ids)

    def take_over(self, offer: PrefixOffer) -> bool:
        """A replica that goes offers what is hot in its cache; whether it is here now."""
        return self._serving().take_over(offer)

    def shutdown(self) -> None:
        """Stop serving; `join` returns."""
        self._serving().close("shut down")

    def _serving(self) -> Leader:
        assert self._leader is not None, "start() comes first"
        return self._leader
