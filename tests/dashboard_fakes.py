"""A gateway whose dashboard shows a fake cluster of any size."""

import json
from contextlib import asynccontextmanager

import httpx
from gateway_fakes import FakeCluster
from view_factories import make_cluster_view

from pagefleet.cluster.api_keys import ApiKey, digest_of
from pagefleet.cluster.gateway_servers import GatewayServers
from pagefleet.cluster.security import GatewaySecurity

ADMIN, ACME = "pf-admin-0123456789abcdef", "pf-acme-0123456789abcdef"
KEYS = (
    ApiKey("ops", digest_of(ADMIN), is_admin=True),
    ApiKey("acme", digest_of(ACME)),
)


class Dashboard(FakeCluster):
    """Both fronts listen. Each look at the cluster moves it on, unless it `is_still`.

    sizes: replicas, blocks of each, host blocks of each.
    """

    def __init__(self, *sizes: int, keys: tuple[ApiKey, ...] | None = None) -> None:
        super().__init__()
        self.sizes = sizes or (4, 256, 128)
        self.tick = 0
        self.is_still = False
        self.servers = GatewayServers(self.gateway, GatewaySecurity(keys))
        self.controller.watch = self.watch

    async def watch(self):
        self.tick += not self.is_still
        return make_cluster_view(*self.sizes, tick=self.tick)

    async def __aenter__(self) -> "Dashboard":
        for leader in self.leaders:
            await leader.start()
        addresses = await self.servers.start("127.0.0.1", 0, 0)
        self.url = f"http://{addresses.http}/dashboard"
        self.http = httpx.AsyncClient(base_url=f"http://{addresses.http}", timeout=20)
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.http.aclose()
        await self.servers.stop(0)
        await super().__aexit__(*failure)

    @asynccontextmanager
    async def events(self, query: str = "?period=0.2", key: str = ""):
        """The stream's events as they come."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with self.http.stream("GET", f"/dashboard/stream{query}", headers=headers) as reply:
            assert reply.status_code == 200, await reply.aread()
            assert reply.headers["content-type"].startswith("text/event-stream")
            lines = reply.aiter_lines()
            yield (json.loads(line[6:]) async for line in lines if line.startswith("data: "))
