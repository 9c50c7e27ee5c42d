"""Tickets, grants and what becomes of them when messages are lost or the controller restarts."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from gateway_fakes import FakeController, FakeLeader, until

from pagefleet.cluster.reservations import Reservations
from pagefleet.protos import errors
from pagefleet.protos.messages import Refused, ReserveRequest


@pytest.fixture
def controller():
    return FakeController([FakeLeader("r0")])


@asynccontextmanager
async def running(controller, **options: object):
    reservations = Reservations(controller, "gw", **options)
    task = asyncio.create_task(reservations.run())
    try:
        yield reservations
    finally:
        task.cancel()
        await reservations.drain()
        assert reservations.num_waiting == 0


def request(key: str = "k", attempt: int = 1) -> ReserveRequest:
    return ReserveRequest(key, attempt, "gw", "tiny", (), 5, 1, 10)


async def test_a_ticket_is_served_by_its_grant(controller):
    controller.is_full = True
    async with running(controller) as reservations:
        waiting = [
            asyncio.create_task(reservations.acquire(request(key), None)) for key in ("a", "b")
        ]
        await until(lambda: len(controller.queue) == 2, controller.changed)
        controller.grant_all()
        leases = await asyncio.gather(*waiting)
    assert [lease.request_key for lease in leases] == ["a", "b"]
    assert not controller.released


async def test_a_grant_can_be_a_refusal(controller):
    controller.is_full = True
    async with running(controller) as reservations:
        waiting = asyncio.create_task(reservations.acquire(request(), None))
        await until(lambda: controller.queue, controller.changed)
        controller.grants.append(Refused("k", 1, "DeadlineExceeded", "it waited too long"))
        controller.woken.set()
        with pytest.raises(errors.DeadlineExceeded):
            await waiting


async def test_who_waits_long_asks_again(controller):
    """The grant was lost; asking again finds it."""
    controller.is_full = True
    async with running(controller, recheck_s=0.02) as reservations:
        waiting = asyncio.create_task(reservations.acquire(request(), None))
        await until(lambda: len(controller.reserved) >= 3, controller.changed)
        controller.is_full = False
        assert (await waiting).request_key == "k"
    assert {sent.attempt for sent in controller.reserved} == {1}, "the same attempt: idempotent"


async def test_after_an_outage_every_waiter_asks_again(controller):
    controller.is_full = True
    outage = asyncio.Event()
    real = controller.next_grants

    async def failing(gateway_id: str):
        if outage.is_set():
            outage.clear()
            controller.queue.clear()  # the new controller knows no tickets
            raise errors.Unavailable("restarting", retry_after_s=1.0)
        return await real(gateway_id)

    controller.next_grants = failing
    async with running(controller) as reservations:
        waiting = asyncio.create_task(reservations.acquire(request(), None))
        await until(lambda: controller.queue, controller.changed)
        outage.set()
        controller.grants.append(Refused("other", 1, "Overloaded", "not ours"))
        controller.woken.set()  # the poll returns, the next one fails
        await until(lambda: len(controller.reserved) == 2, controller.changed)
        controller.grant_all()
        assert (await waiting).request_key == "k"


async def test_a_controller_that_has_come_back_may_not_know_its_replicas_yet(controller):
    unknown = Refused("k", 1, "Unavailable", "no replica has registered yet", 1.0)
    controller.answers = [errors.Unavailable("restarting", retry_after_s=1.0), unknown, unknown]
    async with running(controller) as reservations:
        assert (await reservations.acquire(request(), None)).request_key == "k"
    assert len(controller.reserved) == 4


async def test_without_an_outage_no_replica_is_told_at_once(controller):
    controller.answers = [Refused("k", 1, "Unavailable", "no replica is ready", 1.0)]
    async with running(controller) as reservations:
        with pytest.raises(errors.Unavailable, match="no replica"):
            await reservations.acquire(request(), None)


class OneModelOnDemand:
    """Its replica is there once `here` is set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.here = asyncio.Event()
        self.waits = 0
        self.changed = asyncio.Event()

    def comes_on_demand(self, model: str) -> bool:
        return model == self.name

    async def wait_again(self, model: str) -> None:
        assert model == self.name
        self.waits += 1
        self.changed.set()
        await self.here.wait()


FORGOTTEN = Refused("k", 1, "ModelNotFound", "model 'tiny' is not served here; served: none")


async def test_who_waits_for_a_model_that_the_controller_has_forgotten_waits_again(controller):
    models = OneModelOnDemand("tiny")
    controller.answers = [FORGOTTEN]
    async with running(controller, models=models) as reservations:
        waiting = asyncio.create_task(reservations.acquire(request(), None))
        await until(lambda: models.waits, models.changed)
        assert not waiting.done() and len(controller.reserved) == 1
        models.here.set()
        assert (await waiting).request_key == "k"
    assert {sent.attempt for sent in controller.reserved} == {1}, "the same attempt: idempotent"


async def test_a_model_that_does_not_come_on_demand_is_not_waited_for(controller):
    controller.answers = [FORGOTTEN]
    async with running(controller, models=OneModelOnDemand("another")) as reservations:
        with pytest.raises(errors.ModelNotFound):
            await reservations.acquire(request(), None)


async def test_a_deadline_ends_the_wait_for_a_model(controller):
    controller.answers = [FORGOTTEN]
    now = [0.0]

    def clock() -> float:
        now[0] += 0.5  # each look takes a while
        return now[0]

    models = OneModelOnDemand("tiny")
    async with running(controller, models=models, clock=clock) as reservations:
        with pytest.raises(errors.DeadlineExceeded):
            await reservations.acquire(request(), 1.6)
    assert models.waits == 1 and len(controller.reserved) == 1


async def test_a_controller_that_stays_away_is_unavailable(controller):
    controller.answers = [errors.Unavailable("gone", retry_after_s=1.0) for _ in range(10)]
    async with running(controller, patience_s=0.0) as reservations:
        with pytest.raises(errors.Unavailable):
            await reservations.acquire(request(), None)


async def test_a_cancelled_ticket_is_given_back(controller):
    controller.is_full = True
    async with running(controller) as reservations:
        waiting = asyncio.create_task(reservations.acquire(request(), None))
        await until(lambda: controller.queue, controller.changed)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await until(lambda: controller.released, controller.changed)
        controller.grant_all()
    assert not controller.queue
    assert controller.released == [("k", 1)]


async def test_a_release_never_overtakes_its_reserve(controller):
    """Cancelled while the controller decides: given back only once it has decided."""
    gate = asyncio.Event()
    real = controller.reserve

    async def slow(sent: ReserveRequest):
        await gate.wait()
        return await real(sent)

    controller.reserve = slow
    async with running(controller) as reservations:
        waiting = asyncio.create_task(reservations.acquire(request(), None))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        gate.set()
        await until(lambda: controller.released, controller.changed)
        assert len(controller.reserved) == 1
    assert controller.released == [("k", 1)]


async def test_failures_and_releases_do_not_disturb_when_the_controller_is_away(controller):
    async def away(*_: object) -> None:
        raise errors.Unavailable("gone")

    controller.release = controller.replica_failed = away
    async with running(controller) as reservations:
        reservations.release("k", 1)
        reservations.note_failure("r0", "life")
