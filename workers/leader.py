"""One replica put together: runner, scheduler, engine, data plane and reports. Knows no Ray.

threads:  engine (steps) · loop (gateway streams, reports) · whoever calls `Leader`
"""

import contextlib
import secrets
import threading
import time
from functools import partial
from uuid import uuid4

from ..protos.messages import ReplicaInfo, TransferPeer
from ..scheduler.prefix_imports import ImportOrder
from ..scheduler.scheduler import Scheduler
from ..scheduler.stats import SchedulerStats
from .controller_link import ControllerLink
from .drain import Drain
from .engine_server import EngineServer
from .heartbeat import Pulse, heartbeat_from_environment, step_patience_s
from .loaded_engine import LoadedEngine, model_card
from .loop_thread import LoopThread
from .prefix_mover import ExportGrant, ExportRequest, PrefixMover, PrefixOffer, TransferLink
from .replica_end import ReplicaEnd
from .reporter import Reporter
from .request_spans import RequestSpans
from .tracing import Tracing

_TRANSFER_CALL_S = 15.0


class Leader:
    """A serving replica; each object is one incarnation.

    Args:
        model: the name that clients know it by.
        host: the node's own address; the data plane listens there.
        asked_at: when somebody decided to start it, on the wall clock; None = not known.
        transfers, actors: how blocks are exchanged with other replicas, and the names by which
            they find this one's ranks; None = they are not.
    """

    def __init__(
        self,
        replica_id: str,
        model: str,
        loaded: LoadedEngine,
        link: ControllerLink,
        *,
        host: str,
        node_id: str = "",
        asked_at: float | None = None,
        transfers: TransferLink | None = None,
        actors: tuple[str, ...] = (),
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        self._engine = loaded.engine
        self._ended = threading.Event()
        self._end_reason = ReplicaEnd("")
        self._closing = threading.Lock()
        self._is_closed = False
        incarnation, stream_secret = uuid4().hex, secrets.token_hex(32)
        self._server = EngineServer(
            self._engine,
            incarnation=incarnation,
            stream_secret=stream_secret,
            tls=loaded.runner.config.stream_tls,
            spans=None if tracing is None else RequestSpans(tracing, replica_id),
        )
        self._loop = LoopThread("pagefleet-leader")
        address = self._loop.submit(self._server.start(host)).result()
        block_bytes = loaded.runner.storage.layout.num_bytes
        self._mover = None
        if transfers is not None and loaded.runner.num_host_blocks > 0:
            own = TransferPeer(replica_id, incarnation, actors)
            self._mover = PrefixMover(self._engine, transfers, own, block_bytes)
        self.info = ReplicaInfo(
            replica_id=replica_id,
            incarnation=incarnation,
            model=model,
            identity=loaded.identity,
            address=address,
            stream_secret=stream_secret,
            num_blocks=loaded.runner.num_blocks,
            num_host_blocks=loaded.runner.num_host_blocks,
            max_context=loaded.runner.model_info.max_context,
            max_num_sequences=loaded.runner.config.max_num_sequences,
            prefill_tokens_per_s=loaded.speed.prefill_tokens_per_s,
            decode_step_s=loaded.speed.decode_step_s,
            node_id=node_id,
            block_bytes=block_bytes,
            memory=loaded.runner.partition.text,
            startup_s=0.0 if asked_at is None else max(0.0, time.time() - asked_at),
            checkpoint=loaded.runner.config.model,
            weights_ordered=loaded.runner.config.weights_ordered,
            tensor_parallel=loaded.runner.ranks.world_size,
            actors=actors if self._mover is not None else (),
        )
        self._drain = Drain(
            self._engine,
            self._mover,
            self._loop.loop,
            on_begin=self._on_drain_begin,
            on_done=partial(self._end, "drained", drained=True),
        )
        self._reporter = Reporter(
            self._engine,
            link,
            self.info,
            model_card(model, loaded),
            on_fence=self._on_fence,
            on_drain=self._drain.order,
            on_peers=self._drain.save,
            transfer_stats=None if self._mover is None else self._mover.stats,
        )
        self._engine.start(self._on_change, None if self._mover is None else self._on_import)
        self._loop.submit(self._report_first()).result()
        self._loop.submit(self._reporter.run())
        heartbeat = heartbeat_from_environment(replica_id)
        if heartbeat is not None:
            self._loop.submit(heartbeat.run(self._pulse))

    def stats(self) -> SchedulerStats:
        """The scheduler's numbers, between two steps."""
        return self._engine.call(Scheduler.stats).result()

    def reset_prefix_cache(self) -> int:
        """Drop every cached block on every tier; answers how many there were."""
        return self._engine.call(Scheduler.reset_prefix_cache).result()

    def drain(self, drain_s: float) -> None:
        """Take no new requests, let streams go on for `drain_s`, then end them, and it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended already
            self._loop.loop.call_soon_threadsafe(self._drain.order, drain_s)

    def open_export(self, request: ExportRequest) -> ExportGrant | None:
        """Pin what another replica wants to read; None: it is not here, or there is no room."""
        if self._mover is None:
            return None
        return self._loop.submit(self._mover.open_export(request)).result(_TRANSFER_CALL_S)

    def close_export(self, export_id: int) -> bool:
        """Unpin; whether all was held until now."""
        if self._mover is None:
            return False
        return self._loop.submit(self._mover.close_export(export_id)).result(_TRANSFER_CALL_S)

    def take_over(self, offer: PrefixOffer) -> bool:
        """Fetch what a replica that goes has offered; whether it is here now."""
        if self._mover is None or self._drain.has_begun:
            return False
        return self._loop.submit(self._mover.take_over(offer)).result(_TRANSFER_CALL_S)

    def wait_ended(self) -> ReplicaEnd:
        """Wait until this incarnation can serve no more; answers why."""
        self._ended.wait()
        return self._end_reason

    def close(self, reason: str = "closed") -> None:
        """End every sequence, every stream and both threads. May be called more than once."""
        self._end(reason)
        with self._closing:
            if not self._is_closed:
                self._engine.shutdown()
                self._loop.submit(self._server.stop()).result()
                self._loop.stop()
                if self._tracing is not None:
                    self._tracing.close()
                self._is_closed = True

    async def _report_first(self) -> None:
        """Once the constructor returns, the controller should know this replica and its pool."""
        await self._reporter.tick()
        await self._reporter.tick()

    def _on_change(self) -> None:
        """On the engine's thread, after each step."""
        if self._engine.failure is not None:
            self._end(f"the engine failed: {self._engine.failure!r}")
        elif not self._reporter.has_changes:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody to tell
                self._loop.loop.call_soon_threadsafe(self._reporter.notice_change)
        self._drain.end_if_done()

    def _pulse(self) -> Pulse:
        engine = self._engine
        patience_s = step_patience_s(engine.step_times.p99_s)
        return Pulse(engine.steps_done, engine.num_requests, patience_s)

    def _on_import(self, order: ImportOrder) -> None:
        """On the engine's thread."""
        assert self._mover is not None, "nothing can be fetched"
        with contextlib.suppress(RuntimeError):  # the loop is closed: the engine ends too
            self._loop.loop.call_soon_threadsafe(self._mover.begin, order)

    def _on_fence(self) -> None:
        self._end("declared dead by the controller")

    def _on_drain_begin(self) -> None:
        self._reporter.is_draining = True
        self._reporter.notice_change()

    def _end(self, reason: str, *, drained: bool = False) -> None:
        if not self._ended.is_set():
            self._end_reason = ReplicaEnd(reason, drained, drained and self._reporter.renews)
            self._ended.set()
