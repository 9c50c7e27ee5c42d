"""HTTP bodies in and event streams out, with an eye on the client: who goes away is noticed at
once, while waiting as well as while sending. Knows ASGI, nothing of models.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..protos.errors import InvalidArgument, RequestCancelled, Unavailable

T = TypeVar("T")

_FITS_HEADER = re.compile("[!-~]{1,256}")


class JsonResponse(Response):
    """JSON in ASCII: an error may quote what no UTF-8 can hold."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return to_json(content).encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers.update(_id_headers(scope))
        await super().__call__(scope, receive, send)


def _id_headers(scope: Scope) -> dict[str, str]:
    """The id that the request has got, where a header can hold it: clients choose their own."""
    name: object = scope.get("state", {}).get("request_id")
    if isinstance(name, str) and _FITS_HEADER.fullmatch(name):
        return {"x-request-id": name}
    return {}


def to_json(content: object) -> str:
    """Compact, and never with NaN, which is no JSON."""
    return json.dumps(content, allow_nan=False, separators=(",", ":"))


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body; InvalidArgument above the limit, however its length was announced."""
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise InvalidArgument("body", f"has more than {max_bytes} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


async def or_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`; if the client goes away first, `work` is cancelled.

    The body must have been read: then the next message can only be the disconnect. A server that
    stops cancels what has not ended in time: the client is told to go elsewhere.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RequestCancelled("the client went away")
    except asyncio.CancelledError:
        raise Unavailable("the server is stopping", retry_after_s=1.0) from None
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events; `close` is awaited at the end, also when the client goes away.

    named: each event has a `type`, which is told as its name too.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[object],
        close: Callable[[], Awaitable[None]],
        *,
        named: bool = False,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._named = named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers.update(_id_headers(scope))
        try:
            await or_disconnect(receive, self._send(send))
        except (RequestCancelled, Unavailable):
            return  # there is nobody to tell, or no status to tell it with
        finally:
            await self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            data = event if isinstance(event, str) else to_json(event)
            name = f"event: {_type_of(event)}\n" if self._named else ""
            body = f"{name}data: {data}\n\n".encode("ascii")
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _type_of(event: object) -> object:
    assert isinstance(event, dict), f"a named event is an object, not {event!r}"
    return cast("dict[str, object]", event)["type"]
