"""uvicorn inside a loop that is not its own. Knows an ASGI application and a port."""

import asyncio
import math
import socket
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from .tls import HttpsContext, TlsFiles


class _EmbeddedServer(uvicorn.Server):
    """Leaves signals to the process it runs in."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class HttpServer:
    """Serves one application until it is stopped."""

    def __init__(self, app: ASGIApp, tls: TlsFiles | None = None) -> None:
        self._app = app
        self._tls = tls
        self._listener: socket.socket | None = None
        self._server: _EmbeddedServer | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; the port is chosen where it is 0."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048)
        # For its connections. asyncio does it only where the socket's protocol number says TCP, and
        # this one's is 0: bodies and tokens would wait 40 ms for the acknowledgement of the last.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._listener = listener
        config = uvicorn.Config(
            self._app, lifespan="off", log_config=None, access_log=False, ws="none"
        )
        if self._tls is not None:
            config.load()
            config.ssl = HttpsContext(self._tls).context
        self._server = _EmbeddedServer(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        bound: int = listener.getsockname()[1]
        return bound

    async def stop(self, grace_s: float) -> None:
        """No new connections; running answers have `grace_s` to end."""
        if self._server is None or self._task is None or self._listener is None:
            return
        self._server.config.timeout_graceful_shutdown = math.ceil(grace_s)
        self._server.force_exit = grace_s <= 0
        self._server.should_exit = True
        await self._task
        self._listener.close()  # uvicorn leaves it open if it had not begun to serve
