"""Keeping a cluster's replicas alive: each one that ends, or is declared dead, begins again.

    add ─► starting ─► serving ─► ended, or dead ─► killed for certain ─► starting …
                          └ drain ─► ended ─────────► killed for certain ─► gone for good

Knows replicas as things that start, end and can be killed. Knows nothing of requests; the
controller, which never creates anything, is asked only which incarnations are dead or drain.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace

from ..protos.messages import ReplicaInfo
from ..workers.process_identity import ProcessIdentity
from ..workers.replica_end import ReplicaEnd
from .controller_notices import ControllerNotices, ControllerView
from .replica import Replica, ReplicaFailed, ReplicaSpec

logger = logging.getLogger(__name__)

_MAX_REMEMBERED_DEAD = 1000  # one may be declared dead before its start has returned
_CALL_TIMEOUT_S = 5.0
_LATE_S = 2.0  # a drained replica may take so long beyond its time before it is killed


class _Keeper:
    """One replica over its incarnations.

    info: stands only while one serves. leaving: none is to follow this one. missing_since: from
    when on the controller, asked, did not know the incarnation that serves.
    """

    def __init__(self, spec: ReplicaSpec) -> None:
        self.spec = spec
        self.leaving = False
        self.missing_since: float | None = None
        self.replica: Replica | None = None
        self.info: ReplicaInfo | None = None
        self.declared_dead = asyncio.Event()
        self.first_start: asyncio.Future[ReplicaInfo] = asyncio.get_running_loop().create_future()


class Supervisor:
    """Keeps each replica running until `stop`. Lives on one asyncio loop.

    Args:
        create: makes one incarnation of a replica, not started.
        poll_s: how often the controller is asked.
        missing_s: one that the controller does not know for so long cannot serve, and is replaced:
            frozen while the controller restarted, it is not even declared dead. A controller that
            has not answered for so long is ended, so that Ray starts it anew.
        backoff_s: pause after a failed start; doubles up to `max_backoff_s`.
    """

    def __init__(
        self,
        specs: Sequence[ReplicaSpec],
        create: Callable[[ReplicaSpec], Replica],
        notices: ControllerNotices,
        *,
        poll_s: float = 1.0,
        missing_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        backoff_s: float = 1.0,
        max_backoff_s: float = 30.0,
        start_timeout_s: float = 1800.0,
    ) -> None:
        self._specs = tuple(specs)
        self._create = create
        self._notices = notices
        self._poll_s = poll_s
        self._missing_s = missing_s
        self._clock = clock
        self._backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._start_timeout_s = start_timeout_s
        self._dead: dict[str, None] = {}  # incarnations, oldest first
        self._keepers: dict[_Keeper, asyncio.Task[None]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self.num_restarts = 0

    async def start(self) -> tuple[ReplicaInfo, ...]:
        """Start every replica; raises ReplicaFailed if one cannot be started at first."""
        self._watcher = asyncio.create_task(self._watch())
        keepers = [self._add(spec) for spec in self._specs]
        return tuple(await asyncio.gather(*(keeper.first_start for keeper in keepers)))

    async def add(self, spec: ReplicaSpec) -> ReplicaInfo:
        """One more replica, from now on kept as the others are; raises ReplicaFailed."""
        if any(keeper.spec.replica_id == spec.replica_id for keeper in self._keepers):
            raise ReplicaFailed(f"{spec.replica_id} is there already")
        keeper = self._add(spec)
        await self._notices.replica_wanted(spec.replica_id)
        return await keeper.first_start

    async def drain(self, replica_id: str, drain_s: float) -> bool:
        """Let a replica go once its streams have ended or moved; False if there is none."""
        for keeper in list(self._keepers):
            if keeper.spec.replica_id == replica_id:
                await self._drain(keeper, drain_s)
                return True
        return False

    @property
    def num_kept(self) -> int:
        """Replicas that serve, or will again."""
        return len(self._keepers)

    def infos(self) -> tuple[ReplicaInfo, ...]:
        """The incarnations that serve now."""
        return tuple(keeper.info for keeper in self._keepers if keeper.info is not None)

    def processes(self) -> dict[str, ProcessIdentity]:
        """The leaders' processes of those that serve, by replica id."""
        return {
            keeper.spec.replica_id: keeper.replica.process
            for keeper in self._keepers
            if keeper.info and keeper.replica and keeper.replica.process
        }

    async def stop(self, drain_s: float = 0.0) -> None:
        """Let streams finish for up to `drain_s`, then end every replica for certain."""
        tasks = list(self._keepers.values())
        if drain_s > 0.0 and tasks:
            await asyncio.gather(*(self._drain(keeper, drain_s) for keeper in list(self._keepers)))
            await asyncio.wait(tasks, timeout=drain_s + _LATE_S)
        if self._watcher is not None:
            tasks.append(self._watcher)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _add(self, spec: ReplicaSpec) -> _Keeper:
        keeper = _Keeper(spec)
        task = self._keepers[keeper] = asyncio.create_task(self._keep(keeper))
        task.add_done_callback(lambda _: self._forget(keeper))
        return keeper

    def _forget(self, keeper: _Keeper) -> None:
        del self._keepers[keeper]
        if not keeper.first_start.done():
            problem = f"{keeper.spec.replica_id} was ended before it served"
            keeper.first_start.set_exception(ReplicaFailed(problem))
            keeper.first_start.exception()  # nobody has to be waiting for it

    async def _drain(self, keeper: _Keeper, drain_s: float) -> None:
        keeper.leaving = True
        if keeper.replica is None or keeper.info is None:
            self._keepers[keeper].cancel()  # it serves nobody
            return
        await self._notices.replica_draining(keeper.info, drain_s)
        # The controller tells the leader too; it may be away. A leader that does not hear is
        # frozen, and its end is the watchdog's affair.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(keeper.replica.drain(drain_s), _CALL_TIMEOUT_S)

    async def _keep(self, keeper: _Keeper) -> None:
        """One incarnation after the other."""
        backoff_s = self._backoff_s
        while True:
            keeper.spec = await self._with_wanted_weights(keeper.spec)
            replica = keeper.replica = self._create(keeper.spec)
            try:
                served = await self._live(keeper, replica)
            finally:
                await _to_the_end(self._bury(keeper, replica))
            if keeper.leaving:
                return
            if served:
                backoff_s = self._backoff_s
            else:
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, self._max_backoff_s)
            self.num_restarts += 1

    async def _with_wanted_weights(self, spec: ReplicaSpec) -> ReplicaSpec:
        """The newest ones: an update may have been ordered since it was made."""
        wanted = await self._notices.wanted_weights(spec.model)
        if wanted is None or wanted.version <= spec.config.weights_version:
            return spec
        config = replace(
            spec.config,
            model=wanted.checkpoint,
            revision=None,
            weights_version=wanted.version,
            weights_ordered=True,
        )
        return replace(spec, config=config)

    async def _live(self, keeper: _Keeper, replica: Replica) -> bool:
        """One incarnation from start to end; False if it never served."""
        try:
            info = await asyncio.wait_for(replica.start(), self._start_timeout_s)
        except TimeoutError:
            logger.error("replica %s did not start in time", keeper.spec.replica_id)
            return False
        except ReplicaFailed as error:
            logger.error("replica %s did not start: %s", keeper.spec.replica_id, error)
            if not keeper.first_start.done():
                keeper.first_start.set_exception(error)
            return False
        keeper.info, keeper.missing_since = info, None
        keeper.declared_dead.clear()
        if not keeper.first_start.done():
            keeper.first_start.set_result(info)
        end = await _first(replica.wait_ended(), self._declared_dead(keeper))
        keeper.leaving |= end.drained and not end.renews
        level = logging.INFO if end.drained else logging.WARNING
        logger.log(level, "replica %s ended: %s", keeper.spec.replica_id, end.reason)
        return True

    async def _declared_dead(self, keeper: _Keeper) -> ReplicaEnd:
        await keeper.declared_dead.wait()
        return ReplicaEnd("dead or unknown to the controller")

    async def _bury(self, keeper: _Keeper, replica: Replica) -> None:
        """Its device must not be used again before its processes are gone."""
        info, keeper.info = keeper.info, None
        while True:
            try:
                await replica.kill()
                break
            except ReplicaFailed as error:
                logger.error("replica %s cannot be ended: %s", keeper.spec.replica_id, error)
                await asyncio.sleep(self._backoff_s)
        if info is not None:
            await self._notices.replica_gone(info)

    async def _watch(self) -> None:
        """Ask the controller, for ever; one that does not answer is ended."""
        answered_at = self._clock()
        while True:
            await asyncio.sleep(self._poll_s)
            view = None
            try:
                view = await self._notices.look()
                answered_at = self._clock()
            except TimeoutError:
                if self._clock() - answered_at > self._missing_s:
                    logger.error("the controller does not answer and is ended")
                    await self._notices.end_controller()
                    answered_at = self._clock()
            if view is not None:
                self._remember_dead(view.dead)
            for keeper in self._keepers:
                if keeper.info is not None:
                    self._heed(keeper, keeper.info.incarnation, view)

    def _remember_dead(self, incarnations: Iterable[str]) -> None:
        self._dead |= dict.fromkeys(incarnations)
        while len(self._dead) > _MAX_REMEMBERED_DEAD:
            del self._dead[next(iter(self._dead))]

    def _heed(self, keeper: _Keeper, incarnation: str, view: ControllerView | None) -> None:
        now = self._clock()
        if view is None or incarnation in view.known:
            keeper.missing_since = None
        elif keeper.missing_since is None:
            keeper.missing_since = now
        if view is not None:
            keeper.leaving |= incarnation in view.draining
        missing_s = 0.0 if keeper.missing_since is None else now - keeper.missing_since
        if incarnation in self._dead or missing_s > self._missing_s:
            keeper.declared_dead.set()


async def _first(*ends: Coroutine[object, object, ReplicaEnd]) -> ReplicaEnd:
    """The answer of whichever comes first; the others are cancelled."""
    tasks = [asyncio.create_task(end) for end in ends]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()


async def _to_the_end(work: Coroutine[object, object, None]) -> None:
    """Finish `work` even if the caller is cancelled meanwhile."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
