"""`/dashboard`: the page's files, and the stream behind the same keys as the cluster's state.

The files hold no data and need no key. A browser keeps its key for the tab and sends it with the
stream's request, never in an address. Read-only: nothing here changes anything.
"""

from collections.abc import AsyncGenerator
from importlib.resources import files

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ...protos.errors import InvalidArgument, PagefleetError
from ..access import Access
from ..cluster_watch import DEFAULT_PERIOD_S
from ..gateway import Gateway
from ..http_errors import error_body
from ..http_streams import EventStream, or_disconnect
from .feed import update_to_json

_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Nothing but our own files runs, and no script may turn a string into markup.
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def add_dashboard(app: FastAPI, gateway: Gateway, access: Access) -> None:
    """The routes."""
    endpoints = _Endpoints(gateway, access)
    app.add_api_route("/dashboard", endpoints.page, methods=["GET"])
    app.add_api_route("/dashboard/stream", endpoints.stream, methods=["GET"])
    app.add_api_route("/dashboard/{name}", endpoints.file, methods=["GET"])


class _Endpoints:
    """One method per route."""

    def __init__(self, gateway: Gateway, access: Access) -> None:
        self._gateway = gateway
        self._access = access
        self._files = _read_files()

    async def page(self) -> Response:
        """GET /dashboard"""
        return await self.file("index.html")

    async def file(self, name: str) -> Response:
        """GET /dashboard/{name}: one of the page's own files."""
        content = self._files.get(name)
        if content is None:
            raise HTTPException(404, f"the dashboard has no file {name!r}")
        media_type = _MEDIA_TYPES[name.rpartition(".")[2]]
        return Response(content, media_type=media_type, headers=_HEADERS)

    async def stream(self, request: Request) -> Response:
        """GET /dashboard/stream: an event each `period` seconds, until the reader goes."""
        caller = self._access.identify(request.headers.get("authorization", ""))
        caller.require_admin()
        events = self._events(_period(request.query_params.get("period")))
        first = await or_disconnect(request.receive, anext(events))  # its errors have a status
        return EventStream(_with_first(first, events), events.aclose)

    async def _events(self, period_s: float) -> AsyncGenerator[object]:
        updates = self._gateway.watch_cluster(period_s)
        is_first = True
        try:
            async for update in updates:
                yield update_to_json(update)
                is_first = False
        except PagefleetError as error:
            if is_first:
                raise
            yield error_body(error)
        finally:
            await updates.aclose()


async def _with_first(first: object, rest: AsyncGenerator[object]) -> AsyncGenerator[object]:
    yield first
    async for item in rest:
        yield item


def _period(text: str | None) -> float:
    try:
        return DEFAULT_PERIOD_S if text is None else float(text)
    except ValueError:
        raise InvalidArgument("period", f"{text!r} is no number of seconds") from None


def _read_files() -> dict[str, bytes]:
    folder = files(__package__ or "") / "static"
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}
