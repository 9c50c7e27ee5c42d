"""The controller as a Ray actor: the clock, the waiting, and the lock around `Controller`.

Ray runs each concurrency group of an async actor on an event loop of its own, in its own thread:
a lock keeps the pure controller's methods whole, and who waits for grants is woken across loops.
Reports and reserves are in groups apart, so that waiting never blocks what would end it.

Time stands still while this process does not run (stopped, or starved by a busy machine): nobody
is dead for not having been heard by one who could not listen.
"""

# pyright: reportUnknownMemberType=false, reportUntypedFunctionDecorator=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
import asyncio
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

import ray
from prometheus_client.core import Metric
from ray.actor import ActorHandle

from ..protos.errors import Unavailable
from ..protos.messages import (
    CacheReset,
    ClusterState,
    ClusterView,
    Explanation,
    Lease,
    ModelCard,
    Refused,
    ReplicaInfo,
    ReplicaReport,
    ReportReply,
    ReserveRequest,
    Ticket,
    WantedWeights,
)
from ..workers.json_log import write_logs_as_json
from ..workers.tracing import Span, Tracing, tracing_from_environment
from .autoscaling import BlockDemand, block_demand
from .call_times import CallClock
from .cluster_metrics import ClusterCollector
from .controller import Controller, ControllerConfig
from .draining import DRAIN_S
from .prefix_forest import grow_forest
from .ray_metrics import start_export
from .ray_runtime import on_this_node

logger = logging.getLogger(__name__)

_LONG_POLL_S = 10.0
_MAX_TICK_S = 0.5
_MIN_TICK_S = 0.002
_RESET_TIMEOUT_S = 20.0
_RESET_PAUSE_S = 0.05  # replicas report each second at least
_MAX_REMEMBERED_DEAD = 128
_FROZEN_S = 1.5  # nothing asks for the time for so long: the process did not run
CONCURRENCY_GROUPS = {"reports": 1000, "reserve": 1000, "waits": 10_000}
_LOOP_THREAD = "AsyncIO Thread: {}"


class ControllerService:
    """Everything of the actor but Ray. Methods may be called on different event loops.

    Args:
        on_dead: told of replicas that were declared dead, outside the lock.
    """

    def __init__(
        self,
        config: ControllerConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        on_dead: Callable[[tuple[ReplicaInfo, ...]], None] | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        self._clock = clock
        self._on_dead = on_dead
        self._lock = threading.Lock()
        self._calls = CallClock()
        self._controller = Controller(config, rng or random.Random(), clock())
        self._asked_at = clock()
        self._called_at = clock()
        self._epoch = time.time()  # the next life's is higher, on whichever node
        self._num_demands = 0
        self._frozen_s = 0.0
        self._pollers: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Event]] = {}
        self._dead: deque[ReplicaInfo] = deque(maxlen=_MAX_REMEMBERED_DEAD)

    @ray.method(concurrency_group="reports")
    async def register_replica(self, info: ReplicaInfo, card: ModelCard) -> ReportReply:
        with self._lock:
            return self._controller.register_replica(info, card, self._now())

    @ray.method(concurrency_group="reports")
    async def report(self, report: ReplicaReport) -> ReportReply:
        with self._deciding("report"):
            reply = self._controller.report(report, self._now())
            self._wake_pollers()
        return reply

    @ray.method(concurrency_group="reserve")
    async def reserve(self, request: ReserveRequest) -> Lease | Ticket | Refused:
        span = None
        if self._tracing is not None and request.trace.traceparent:
            span = self._tracing.start("controller.decide", trace=request.trace)
        with self._deciding("reserve"):
            answer = self._controller.reserve(request, self._now())
            self._wake_pollers()
        if span is not None:
            _end_span(span, request, answer)
        return answer

    @ray.method(concurrency_group="reserve")
    async def release(
        self, request_key: str, attempt: int, output_tokens: int | None = None
    ) -> None:
        with self._deciding("release"):
            self._controller.release(request_key, attempt, self._now(), output_tokens)
            self._wake_pollers()

    @ray.method(concurrency_group="waits")
    async def next_grants(self, gateway_id: str) -> tuple[Lease | Refused, ...]:
        """The answers to tickets; waits for one, at most 10 s."""
        woken = asyncio.Event()
        with self._lock:
            answers = self._controller.poll_grants(gateway_id, self._now())
            if answers:
                return answers
            self._pollers[gateway_id] = (asyncio.get_running_loop(), woken)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LONG_POLL_S):
                    await woken.wait()
        finally:
            with self._lock:
                poller = self._pollers.get(gateway_id)
                if poller is not None and poller[1] is woken:
                    del self._pollers[gateway_id]
        with self._lock:
            return self._controller.poll_grants(gateway_id, self._now())

    async def model_cards(self) -> tuple[ModelCard, ...]:
        with self._lock:
            self._called_at = self._clock()
            return self._controller.model_cards()

    async def block_demands(self, startup_s: Mapping[str, float]) -> dict[str, BlockDemand]:
        """Of each model asked for. startup_s: what its replicas take to start, if none has yet."""
        with self._lock:
            self._num_demands += 1
            now = self._now()
            return {
                model: block_demand(
                    self._controller.pools_of(model),
                    now,
                    startup_s=expected_s,
                    epoch=self._epoch,
                    sequence=self._num_demands,
                )
                for model, expected_s in startup_s.items()
            }

    async def cluster_state(self) -> ClusterState:
        return self.state_now()

    def state_now(self) -> ClusterState:
        """From any thread."""
        with self._lock:
            state = self._controller.cluster_state(self._now())
            return replace(state, calls=self._calls.stats())

    async def watch(self) -> ClusterView:
        """All that a dashboard shows. Replicas send maps of their pools while someone asks this."""
        with self._lock:
            view = self._controller.watch(self._now())
            prompts = self._controller.recent_prompts()
        runs = grow_forest(prompts)  # compares thousands of hashes: reserves need not wait for it
        with self._lock:
            view = self._controller.with_prefixes(view, runs)
            return replace(view, state=replace(view.state, calls=self._calls.stats()))

    async def explain(self, request: ReserveRequest) -> Explanation | Refused:
        with self._lock:
            return self._controller.explain(request, self._now())

    @ray.method(concurrency_group="reports")
    async def replica_failed(self, replica_id: str, incarnation: str) -> None:
        with self._lock:
            self._controller.replica_failed(replica_id, incarnation, self._now())

    @ray.method(concurrency_group="reports")
    async def declare_dead(self, replica_id: str) -> None:
        """A supervisor knows that the replica's processes are gone."""
        with self._lock:
            self._controller.declare_dead(replica_id, self._now())
            self._wake_pollers()

    async def can_move(self, replica_id: str) -> bool:
        """Whether another replica could go on with this one's streams."""
        with self._lock:
            return self._controller.can_move(replica_id)

    @ray.method(concurrency_group="reports")
    async def drain(self, replica_id: str, draining: bool = True, drain_s: float = DRAIN_S) -> bool:
        """No new leases; its leader ends once its streams have ended or moved."""
        with self._lock:
            now = self._now()
            known = self._controller.drain(replica_id, now, draining=draining, drain_s=drain_s)
            self._wake_pollers()
        return known

    @ray.method(concurrency_group="reserve")
    async def update_weights(self, model: str, checkpoint: str, drain_s: float) -> int:
        """New weights for the model, one replica after the other; their version."""
        with self._deciding("update_weights"):
            version = self._controller.update_weights(model, checkpoint, drain_s, self._now())
            self._wake_pollers()
        return version

    async def wanted_weights(self, model: str) -> WantedWeights | None:
        """What a replica of the model that starts now is to load."""
        with self._lock:
            return self._controller.wanted_weights(model)

    @ray.method(concurrency_group="waits")
    async def reset_prefix_cache(self, model: str) -> tuple[CacheReset, ...]:
        """Returns once every replica has forgotten what it had cached; Unavailable if one does not
        answer.
        """
        with self._lock:
            order = self._controller.order_reset(model)
        deadline = self._clock() + _RESET_TIMEOUT_S
        while True:
            with self._lock:
                done, missing = self._controller.resets(order)
            if not missing:
                return done
            if self._clock() > deadline:
                names = ", ".join(missing)
                raise Unavailable(f"still caching: {names}", retry_after_s=_RESET_TIMEOUT_S)
            await asyncio.sleep(_RESET_PAUSE_S)

    async def dead_replicas(self) -> tuple[ReplicaInfo, ...]:
        """Replicas lately declared dead: each supervisor kills and rebuilds its own of them."""
        with self._lock:
            return tuple(self._dead)

    async def check_integrity(self) -> None:
        with self._lock:
            self._controller.check_integrity()

    def tick(self) -> float:
        """What time brings about; returns the seconds until the next tick is due."""
        with self._deciding("tick"):
            now = self._now()
            dead = self._controller.tick(now)
            self._dead.extend(dead)
            self._wake_pollers()
            wakeup = self._controller.next_wakeup(now)
        for info in dead:
            logger.warning("replica %s (%s) is dead", info.replica_id, info.incarnation)
        if dead and self._on_dead is not None:
            self._on_dead(dead)
        if wakeup is None:
            return _MAX_TICK_S
        return max(_MIN_TICK_S, min(wakeup - now, _MAX_TICK_S))

    @property
    def silence_s(self) -> float:
        """For how long neither a gateway nor a replica has called."""
        return self._clock() - self._called_at

    async def run(self) -> None:
        """Tick for ever."""
        while True:
            await asyncio.sleep(self.tick())

    @contextmanager
    def _deciding(self, call: str) -> Generator[None]:
        """Under the lock; how long it is held for is counted, the wait for it is not."""
        with self._lock:
            began = time.perf_counter()
            if call != "tick":
                self._called_at = self._clock()
            try:
                yield
            finally:
                self._calls.add(call, time.perf_counter() - began)

    def _now(self) -> float:
        """The clock, less the time in which this process did not run. Called under the lock."""
        now = self._clock()
        silence_s = now - self._asked_at
        if silence_s > _FROZEN_S:
            self._frozen_s += silence_s - _MAX_TICK_S
        self._asked_at = now
        return now - self._frozen_s

    def _wake_pollers(self) -> None:
        # Called under the lock. A poller's loop may be closing: then nobody waits there.
        for gateway_id, (loop, woken) in self._pollers.items():
            if self._controller.has_grants(gateway_id):
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(woken.set)


class ControllerActor(ControllerService):
    """The service with its timer; made an actor by `start_controller`.

    Args:
        linger_s: it ends itself once nobody has called it for so long; None = it never does.
    """

    def __init__(
        self, config: ControllerConfig | None = None, linger_s: float | None = None
    ) -> None:
        write_logs_as_json()
        tracing = tracing_from_environment("controller", f"controller-{os.getpid()}")
        super().__init__(config or ControllerConfig(), tracing=tracing)
        self._linger_s = linger_s
        threading.Thread(target=self._run_timer, name="controller-timer", daemon=True).start()
        start_export(self._families)

    def _families(self) -> Iterable[Metric]:
        """What the controller knows, as metrics."""
        collector = ClusterCollector()
        collector.state = self.state_now()
        return collector.collect()

    def _run_timer(self) -> None:
        while True:
            time.sleep(self.tick())
            if lost := lost_event_loops([thread.name for thread in threading.enumerate()]):
                # Their calls would wait for ever. Ray starts it anew, as after any crash.
                logger.error("Ray runs no event loop for %s: beginning anew", ", ".join(lost))
                os._exit(1)
            if self._linger_s is not None and self.silence_s > self._linger_s:
                logger.info("nobody has called for %g s: the controller ends", self._linger_s)
                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def lost_event_loops(threads: Iterable[str]) -> list[str]:
    """Concurrency groups whose event loop nobody runs, by the names of this process's threads.

    Ray starts a thread for each, which looks up its loop when it begins to run: if the machine is
    so busy that the next loop has been made by then, two threads run one loop, and one of them
    ends at once.
    """
    names = set(threads)
    if _LOOP_THREAD.format("default") not in names:
        return []  # this Ray names them otherwise
    return [group for group in CONCURRENCY_GROUPS if _LOOP_THREAD.format(group) not in names]


def _end_span(span: Span, request: ReserveRequest, answer: Lease | Ticket | Refused) -> None:
    span.set(
        pagefleet__request_id=request.request_id,
        pagefleet__request_key=request.request_key,
        pagefleet__decision=type(answer).__name__.lower(),
    )
    if isinstance(answer, Lease):
        span.set(
            pagefleet__replica=answer.replica_id,
            pagefleet__hit_tokens=answer.expected_hit_tokens,
            pagefleet__lease_blocks=answer.num_blocks,
        )
    if isinstance(answer, Refused):
        span.fail(answer.reason)
    else:
        span.end()


def start_controller(
    config: ControllerConfig | None = None,
    *,
    name: str | None = None,
    namespace: str | None = None,
    linger_s: float | None = None,
) -> ActorHandle[ControllerActor]:
    """Create the actor: no CPU of its own, restarted for ever, never retrying a call.

    linger_s: it outlives whoever creates it, until nobody has called it for so long; if there is
    one of that name, it is that one, with the settings that it has.
    """
    actor = ray.remote(
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=0,
        enable_task_events=False,  # Ray would keep a record of every call: 3 KB, of 100,000 calls
        concurrency_groups=CONCURRENCY_GROUPS,
    )(ControllerActor)  # pyright: ignore[reportCallIssue]
    options = actor.options(
        name=name,
        namespace=namespace,
        scheduling_strategy=on_this_node(soft=True),
        get_if_exists=linger_s is not None,
        lifetime=None if linger_s is None else "detached",
    )
    return options.remote(config, linger_s)
