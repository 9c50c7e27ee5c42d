"""A gateway that dies, freezes or cannot listen, and what its keeper does."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from pagefleet.cluster.gateway_addresses import GatewayAddresses
from pagefleet.cluster.gateway_keeper import GatewayKeeper, GatewayLost
from pagefleet.cluster.gateway_spec import GatewaySpec

SPEC = GatewaySpec("127.0.0.1", 0, 0)


@dataclass
class FakeGateway:
    """Listens unless told otherwise; `lost` ends it, `frozen` silences it."""

    spec: GatewaySpec
    events: list[str]
    start_error: GatewayLost | None = None
    lost: bool = False
    frozen: bool = False
    pinged: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> GatewayAddresses:
        self.events.append("start")
        if self.start_error is not None:
            raise self.start_error
        grpc, http = self.spec.grpc_port or 50, self.spec.http_port or 80
        return GatewayAddresses(f"127.0.0.1:{grpc}", f"127.0.0.1:{http}")

    async def ping(self) -> dict[str, int]:
        self.pinged.set()
        if self.frozen:
            await asyncio.Event().wait()
        if self.lost:
            raise GatewayLost("its process is lost")
        return {"m": 2}

    async def stop(self, grace_s: float) -> None:
        self.events.append(f"stop {grace_s:g}")

    async def retire(self, grace_s: float) -> None:
        if self.lost:
            raise GatewayLost("its process is lost")
        self.events.append(f"retire {grace_s:g}")

    async def kill(self) -> None:
        self.events.append("kill")


class Fleet:
    """Every life that was made."""

    def __init__(self) -> None:
        self.made: list[FakeGateway] = []
        self.events: list[str] = []
        self.prepare: Callable[[FakeGateway], None] = lambda gateway: None

    def create(self, spec: GatewaySpec) -> FakeGateway:
        gateway = FakeGateway(spec, self.events)
        self.prepare(gateway)
        self.made.append(gateway)
        return gateway

    async def wait_pinged(self, number: int) -> FakeGateway:
        async with asyncio.timeout(5.0):
            while len(self.made) <= number:
                await asyncio.sleep(0)
            await self.made[number].pinged.wait()
        return self.made[number]


@pytest.fixture
async def fleet():
    made = Fleet()
    made.keeper = GatewayKeeper(SPEC, made.create, ping_s=0.0, silence_s=0.05, backoff_s=0.0)
    yield made
    await made.keeper.stop(0.0)


@pytest.mark.parametrize("fault", ["lost", "frozen"])
async def test_another_takes_the_ports_of_one_that_is_gone(fleet: Fleet, fault: str) -> None:
    assert await fleet.keeper.start() == GatewayAddresses("127.0.0.1:50", "127.0.0.1:80")
    first = await fleet.wait_pinged(0)
    setattr(first, fault, True)
    second = await fleet.wait_pinged(1)
    assert (second.spec.grpc_port, second.spec.http_port) == (50, 80)
    assert fleet.events == ["start", "kill", "start"], "nobody listens beside it"
    assert fleet.keeper.current is second
    assert fleet.keeper.num_restarts == 1


async def test_a_restart_is_tried_until_it_works(fleet: Fleet) -> None:
    await fleet.keeper.start()
    first = await fleet.wait_pinged(0)

    def break_two(gateway: FakeGateway) -> None:
        if len(fleet.made) < 3:
            gateway.start_error = GatewayLost("address in use")

    fleet.prepare = break_two
    first.lost = True
    await fleet.wait_pinged(3)
    assert fleet.events == ["start", "kill", "start", "kill", "start", "kill", "start"]


async def test_what_cannot_listen_at_first_is_told_and_left(fleet: Fleet) -> None:
    fleet.prepare = lambda gateway: setattr(gateway, "start_error", GatewayLost("in use"))
    with pytest.raises(GatewayLost, match="in use"):
        await fleet.keeper.start()
    assert fleet.events == ["start", "kill"]
    assert not fleet.keeper.is_listening


async def test_what_it_holds_is_known_from_its_answers(fleet: Fleet) -> None:
    await fleet.keeper.start()
    await fleet.wait_pinged(0)
    async with asyncio.timeout(5.0):
        while fleet.keeper.held != {"m": 2}:
            await asyncio.sleep(0)


async def test_stop_lets_calls_end_and_retire_does_not_wait_for_them(fleet: Fleet) -> None:
    await fleet.keeper.start()
    await fleet.keeper.stop(3.0)
    assert fleet.events == ["start", "stop 3", "kill"]
    other = GatewayKeeper(replace(SPEC, grpc_port=9), fleet.create, ping_s=0.0)
    await other.start()
    await other.retire(600.0)
    assert fleet.events[3:] == ["start", "retire 600"]


async def test_one_that_is_lost_when_it_should_retire_is_killed(fleet: Fleet) -> None:
    await fleet.keeper.start()
    fleet.made[0].lost = True
    await fleet.keeper.retire(600.0)
    assert fleet.events[-1] == "kill"
