"""Keeping one gateway listening: when its process dies or freezes, another takes its ports.

    start ─► listening ─► lost, or silent ─► killed for certain ─► start, on the same ports …

Knows gateways as things that listen, answer pings and can be killed. Knows nothing of requests:
clients of a lost gateway come back with their `resume_token_ids`.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from ..workers.process_identity import ProcessIdentity, kill_for_certain
from .gateway_actor import start_gateway
from .gateway_addresses import GatewayAddresses
from .gateway_spec import GatewaySpec

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0  # beyond the time that its ports may be taken
_RETIRE_TIMEOUT_S = 10.0
_RELEASE_S = 10.0  # the system may keep the ports of a killed process for a moment


class GatewayLost(Exception):
    """A gateway could not listen, or is no more."""


class KeptGateway(Protocol):
    """One life of a gateway. Every call may raise GatewayLost, or take too long."""

    async def start(self) -> GatewayAddresses:
        """Listen."""
        ...

    async def ping(self) -> dict[str, int]:
        """See `GatewayActor.ping`."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, let running ones end."""
        ...

    async def retire(self, grace_s: float) -> None:
        """The same, by itself: answers once it takes no new calls."""
        ...

    async def kill(self) -> None:
        """End its process for certain."""
        ...


class GatewayKeeper:
    """Keeps one gateway until `stop` or `retire`. Lives on one asyncio loop.

    Args:
        create: makes one life of the gateway, not started.
        silence_s: one that has not answered for so long is frozen, and is ended.
    """

    def __init__(
        self,
        spec: GatewaySpec,
        create: Callable[[GatewaySpec], KeptGateway],
        *,
        ping_s: float = 1.0,
        silence_s: float = 15.0,
        backoff_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._create = create
        self._ping_s = ping_s
        self._silence_s = silence_s
        self._backoff_s = backoff_s
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self.current: KeptGateway | None = None
        self.held: dict[str, int] = {}
        self.num_restarts = 0

    @property
    def is_listening(self) -> bool:
        """It answered the last ping."""
        return self.current is not None

    async def start(self) -> GatewayAddresses:
        """Listen, and go on listening there; raises GatewayLost if it cannot at first."""
        gateway, addresses = await self._begin(self._spec)
        self.current = gateway
        self._spec = replace(
            self._spec,
            grpc_port=_port(addresses.grpc),
            http_port=_port(addresses.http),
            bind_timeout_s=max(self._spec.bind_timeout_s, _RELEASE_S),
        )
        self._task = asyncio.create_task(self._keep(gateway))
        return addresses

    async def stop(self, grace_s: float) -> None:
        """Let running calls end for up to `grace_s`, then end it for certain."""
        gateway = await self._let_go()
        if gateway is not None:
            try:
                await asyncio.wait_for(gateway.stop(grace_s), grace_s + _RETIRE_TIMEOUT_S)
            except (GatewayLost, TimeoutError) as error:
                logger.warning("the gateway did not stop by itself: %r", error)
            await gateway.kill()

    async def retire(self, grace_s: float) -> None:
        """Leave it alone with its running calls; returns once it takes no new ones."""
        gateway = await self._let_go()
        if gateway is not None:
            try:
                await asyncio.wait_for(gateway.retire(grace_s), _RETIRE_TIMEOUT_S)
            except (GatewayLost, TimeoutError):
                await gateway.kill()

    async def _let_go(self) -> KeptGateway | None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        gateway, self.current = self.current, None
        return gateway

    async def _keep(self, gateway: KeptGateway) -> None:
        while True:
            logger.warning("the gateway is lost: %s", await self._watch(gateway))
            self.current, self.held = None, {}
            await gateway.kill()
            self.num_restarts += 1
            gateway = await self._restart()
            self.current = gateway

    async def _watch(self, gateway: KeptGateway) -> str:
        """Until it is lost; answers why."""
        answered_at = self._clock()
        while self._clock() - answered_at < self._silence_s:
            await asyncio.sleep(self._ping_s)
            try:
                async with asyncio.timeout(self._silence_s):  # wait_for may lose a cancellation
                    self.held = await gateway.ping()
            except GatewayLost as error:
                return str(error)
            except TimeoutError:
                break
            answered_at = self._clock()
        return f"no answer in {self._silence_s:g} s"

    async def _restart(self) -> KeptGateway:
        while True:
            try:
                return (await self._begin(self._spec))[0]
            except GatewayLost as error:
                logger.error("the gateway could not be started again: %s", error)
            await asyncio.sleep(self._backoff_s)

    async def _begin(self, spec: GatewaySpec) -> tuple[KeptGateway, GatewayAddresses]:
        gateway = self._create(spec)
        try:
            timeout_s = _START_TIMEOUT_S + spec.bind_timeout_s
            return gateway, await asyncio.wait_for(gateway.start(), timeout_s)
        except TimeoutError:
            await gateway.kill()
            raise GatewayLost("it did not start in time") from None
        except (GatewayLost, asyncio.CancelledError):
            await gateway.kill()
            raise


class RayGateway:
    """A gateway as an actor on this node."""

    def __init__(self, spec: GatewaySpec, controller: "ActorHandle[object]") -> None:
        self._spec = spec
        self._controller = controller
        self._process: ProcessIdentity | None = None
        self.actor: ActorHandle[object] | None = None

    async def start(self) -> GatewayAddresses:
        """See KeptGateway."""
        self.actor = start_gateway(self._controller, self._spec)
        self._process = cast(ProcessIdentity, await _answer(self.actor.identify.remote()))
        return cast(GatewayAddresses, await _answer(self.actor.start.remote()))

    async def ping(self) -> dict[str, int]:
        """See KeptGateway."""
        return cast("dict[str, int]", await _answer(self._started.ping.remote()))

    async def stop(self, grace_s: float) -> None:
        """See KeptGateway."""
        await _answer(self._started.stop.remote(grace_s))

    async def retire(self, grace_s: float) -> None:
        """See KeptGateway."""
        await _answer(self._started.retire.remote(grace_s))

    async def kill(self) -> None:
        """See KeptGateway."""
        if self.actor is not None:
            ray.kill(self.actor)
        if self._process is not None and not await asyncio.to_thread(
            kill_for_certain, self._process
        ):
            logger.error("the gateway's process %d cannot be ended", self._process.pid)

    @property
    def _started(self) -> "ActorHandle[object]":
        assert self.actor is not None, "start() comes first"
        return self.actor


async def _answer(reply: object) -> object:
    try:
        return await cast(Awaitable[object], reply)
    except RayTaskError as error:
        raise GatewayLost(str(error.cause)) from error
    except RayError as error:
        raise GatewayLost(f"its process is lost: {type(error).__name__}") from error


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
