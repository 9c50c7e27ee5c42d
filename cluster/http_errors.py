"""Errors as OpenAI's clients read them: bodies, headers, and which field of a body is wrong.

Knows the tree of errors, the framework's own and pydantic's reports; nothing of endpoints.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import cast

from fastapi import FastAPI, Request
from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..protos.errors import InternalError, InvalidArgument, PagefleetError
from .http_streams import JsonResponse
from .metrics import GatewayMetrics

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
# Where the public proto and OpenAI call the same thing by different names.
_PARAMS = {
    "text": "prompt",
    "token_ids": "prompt",
    "token_ids.ids": "prompt",
    "chat": "messages",
    "chat.messages": "messages",
    "sampling.beam_width": "n",
}
_MAX_SHAPES = 16  # more than the problems that one field ever has
_MAX_QUOTED = 40
_NOTHING = object()


def error_body(error: PagefleetError, names: Mapping[str, str] | None = None) -> dict[str, object]:
    """`{"error": …}`. names: of fields, as the body of the request had them."""
    param, message = None, error.message
    if isinstance(error, InvalidArgument):
        known = _PARAMS | dict(names or {})
        param = known.get(error.field, error.field.removeprefix("sampling."))
        message = f"{param}: {error.problem}"
    return {
        "error": {
            "message": message,
            "type": _ERROR_TYPES.get(error.http_status, "server_error"),
            "param": param,
            "code": error.reason.lower(),
        }
    }


def error_headers(error: PagefleetError) -> dict[str, str]:
    """When to come back: whole seconds for everyone, milliseconds for who reads them.

    OpenAI's clients try again after any 5xx. Where that does not help they are told so: a passed
    deadline would else be waited for three times.
    """
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
        headers["retry-after-ms"] = str(round(error.retry_after_s * 1000))
    elif error.http_status >= 500:
        headers["x-should-retry"] = "false"
    if error.retry_token:
        headers["retry-token"] = error.retry_token
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def problem_of(error: ValidationError, body: bytes) -> InvalidArgument:
    """The first thing that is wrong with a body, by the path of its field.

    A field that takes several shapes has a problem with each of them; the one that lies deepest
    is of the shape that was meant.
    """
    problems = error.errors(include_url=False)
    value: object = from_json(body) if problems[0]["loc"] else None
    found = [(_path(problem, value), problem) for problem in islice(problems, _MAX_SHAPES)]
    first, _ = found[0]
    path, problem = max(
        (each for each in found if each[0][: len(first)] == first), key=lambda each: len(each[0])
    )
    return InvalidArgument(".".join(path) or "body", _text(problem))


def _path(problem: ErrorDetails, value: object) -> Sequence[str]:
    """The steps that the body has; pydantic also names the shapes that it has tried."""
    path: list[str] = []
    for step in problem["loc"]:
        inner = _inner(value, step)
        if inner is not _NOTHING:
            path.append(str(step))
            value = inner
    if problem["type"] == "missing":
        path.append(str(problem["loc"][-1]))
    return path


def _inner(value: object, step: int | str) -> object:
    if isinstance(value, dict):
        return cast("dict[object, object]", value).get(step, _NOTHING)
    if isinstance(value, list) and isinstance(step, int):
        items = cast("list[object]", value)
        return items[step] if step < len(items) else _NOTHING
    return _NOTHING


def _text(problem: ErrorDetails) -> str:
    given: object = problem["input"]
    if problem["type"] == "literal_error" and isinstance(given, str) and len(given) < _MAX_QUOTED:
        return f"{problem['msg']}, is {given!r}"
    return problem["msg"]


def answer_errors(app: FastAPI, metrics: GatewayMetrics) -> None:
    """Every error of the application leaves as `{"error": …}`, also those of the framework."""

    def answer(request: Request, error: PagefleetError) -> Response:
        metrics.count_error("http", error)
        body = error_body(error, getattr(request.state, "names", None))
        return JsonResponse(body, status_code=error.http_status, headers=error_headers(error))

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, PagefleetError), f"registered for the tree, got {error!r}"
        return answer(request, error)

    async def framework(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), f"registered for HTTP errors, got {error!r}"
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        message = f"{error.detail}: {request.method} {request.url.path}"
        body = {"message": message, "type": kind, "param": None, "code": None}
        return JsonResponse({"error": body}, status_code=error.status_code, headers=error.headers)

    async def bug(request: Request, error: Exception) -> Response:
        return answer(request, InternalError("a fault in the server; its log says more"))

    app.add_exception_handler(PagefleetError, ours)
    app.add_exception_handler(HTTPException, framework)
    app.add_exception_handler(Exception, bug)
