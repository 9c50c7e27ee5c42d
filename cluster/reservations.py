"""A gateway's dealings with the controller's admission: ask, wait for a grant, give back.

A request that has to wait holds a ticket; one `next_grants` call serves all of a gateway's
tickets. Nothing relies on a grant to arrive: who waits long asks again, which is idempotent, so
lost grants and a restarted controller cost time and nothing else. A controller that restarts while
a model has no replica knows nothing of it: who waited there waits for the model again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Protocol

from ..protos.errors import (
    DeadlineExceeded,
    ModelNotFound,
    PagefleetError,
    Unavailable,
    error_named,
)
from ..protos.messages import Lease, Refused, ReserveRequest, Ticket
from .controller_client import ControllerClient

logger = logging.getLogger(__name__)

_PAUSE_S = 0.2  # between tries to reach a controller that is away
_TOO_LATE = "the deadline passed before a replica was found"


class OnDemandModels(Protocol):
    """Models whose first replica comes when somebody asks."""

    def comes_on_demand(self, model: str) -> bool:
        """Whether it is one of them."""
        ...

    async def wait_again(self, model: str) -> None:
        """Until the controller knows it; raises Unavailable where no replica comes in time."""
        ...


class _Waiter:
    """One request that asked and has no lease yet."""

    def __init__(self) -> None:
        self.call: asyncio.Future[Lease | Ticket | Refused] | None = None  # the newest question
        self.answer: Lease | Refused | None = None
        self.wakeup = asyncio.Event()


class Reservations:
    """Leases for one gateway. `run` must be running for tickets to be served at once.

    Args:
        recheck_s: who has waited so long for a grant asks again.
        patience_s: how long a controller may be away before requests are refused; and how long
            after that it may take until the replicas have registered with it again.
        models: those that a controller which restarts may have forgotten; None = none.
    """

    def __init__(
        self,
        controller: ControllerClient,
        gateway_id: str,
        *,
        recheck_s: float = 10.0,
        patience_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        models: OnDemandModels | None = None,
    ) -> None:
        self._controller = controller
        self._gateway_id = gateway_id
        self._recheck_s = recheck_s
        self._patience_s = patience_s
        self._clock = clock
        self._models = models
        self._away_at: float | None = None  # when the controller was last found to be away
        self._waiters: dict[tuple[str, int], _Waiter] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_waiting(self) -> int:
        """Requests without an answer."""
        return len(self._waiters)

    async def run(self) -> None:
        """Take grants for ever. After an outage every waiter asks again."""
        while True:
            try:
                grants = await self._controller.next_grants(self._gateway_id)
            except PagefleetError as error:
                logger.warning("waiting for grants: %s", error)
                self._note_away(error)
                await asyncio.sleep(_PAUSE_S)
                for waiter in self._waiters.values():
                    waiter.wakeup.set()
                continue
            for grant in grants:
                self._deliver(grant)

    async def acquire(self, request: ReserveRequest, deadline: float | None) -> Lease:
        """A lease for the request, after as long a wait as it takes.

        deadline: on the clock. Raises what the controller's refusal names. If cancelled, the
        ticket or lease is given back.
        """
        key = (request.request_key, request.attempt)
        waiter = self._waiters[key] = _Waiter()
        try:
            while True:
                answer = await self._reserve(waiter, request, deadline)
                if isinstance(answer, Ticket):
                    answer = await self._wait(waiter)
                if isinstance(answer, Lease):
                    return answer
                if answer is not None:
                    if not self._may_pass(answer):
                        await self._wait_for_model(answer, request, deadline)
                    await asyncio.sleep(_PAUSE_S)
        except asyncio.CancelledError:
            self._spawn(self._give_back(waiter, request))
            raise
        finally:
            del self._waiters[key]

    def release(self, request_key: str, attempt: int) -> None:
        """Give a ticket or lease back, in the background."""
        self._spawn(self._controller.release(request_key, attempt))

    def note_failure(self, replica_id: str, incarnation: str) -> None:
        """Tell the controller that a replica's stream broke, in the background."""
        self._spawn(self._controller.replica_failed(replica_id, incarnation))

    async def drain(self) -> None:
        """Wait for the calls in the background."""
        await asyncio.gather(*self._tasks)

    def _spawn(self, call: Coroutine[object, object, None]) -> None:
        """Run a call whose outcome no request depends on; the controller may be away."""
        task = asyncio.create_task(_forgive(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reserve(
        self, waiter: _Waiter, request: ReserveRequest, deadline: float | None
    ) -> Lease | Ticket | Refused:
        gives_up = self._clock() + self._patience_s
        while True:
            left = None if deadline is None else deadline - self._clock()
            if left is not None and left <= 0:
                raise DeadlineExceeded(_TOO_LATE)
            call = self._controller.reserve(replace(request, deadline_s=left))
            waiter.call = asyncio.ensure_future(call)
            try:
                return await asyncio.shield(waiter.call)
            except Unavailable as error:
                self._note_away(error)
                if self._clock() >= gives_up:
                    raise
            await asyncio.sleep(_PAUSE_S)

    def _note_away(self, error: PagefleetError) -> None:
        if isinstance(error, Unavailable):
            self._away_at = self._clock()

    def _may_pass(self, refused: Refused) -> bool:
        """A controller that has just come back may only not know its replicas yet."""
        if self._away_at is None or refused.error != Unavailable.__name__:
            return False
        return self._clock() - self._away_at < self._patience_s

    async def _wait_for_model(
        self, refused: Refused, request: ReserveRequest, deadline: float | None
    ) -> None:
        """Until it may be asked for again; raises the refusal where it is final."""
        models, model = self._models, request.model
        is_forgotten = refused.error == ModelNotFound.__name__
        if models is None or not is_forgotten or not models.comes_on_demand(model):
            raise error_of(refused)
        left = None if deadline is None else max(0.0, deadline - self._clock())
        try:
            async with asyncio.timeout(left):
                await models.wait_again(model)
        except TimeoutError:
            raise DeadlineExceeded(_TOO_LATE) from None

    async def _give_back(self, waiter: _Waiter, request: ReserveRequest) -> None:
        """Not before the controller has decided: the release might overtake the question."""
        if waiter.call is not None:
            await asyncio.wait({waiter.call})
        await self._controller.release(request.request_key, request.attempt)

    async def _wait(self, waiter: _Waiter) -> Lease | Refused | None:
        """The grant; None = ask again."""
        try:
            async with asyncio.timeout(self._recheck_s):
                await waiter.wakeup.wait()
        except TimeoutError:
            pass
        waiter.wakeup.clear()
        return waiter.answer

    def _deliver(self, grant: Lease | Refused) -> None:
        # One that nobody waits for was given back when its request was cancelled.
        waiter = self._waiters.get((grant.request_key, grant.attempt))
        if waiter is not None:
            waiter.answer = grant
            waiter.wakeup.set()


async def _forgive(call: Coroutine[object, object, None]) -> None:
    try:
        await call
    except PagefleetError as error:
        logger.warning("the controller did not take a notice: %s", error)


def error_of(refused: Refused) -> PagefleetError:
    """What a refusal is for the client."""
    return error_named(
        refused.error,
        refused.reason,
        retry_after_s=refused.retry_after_s,
        retry_token=refused.retry_token,
    )
