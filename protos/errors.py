"""Every error a client can meet, with its gRPC and HTTP status. Knows no transport.

PagefleetError
├── InvalidArgument      400  INVALID_ARGUMENT      a field is wrong; a retry will not help
├── ModelNotFound        404  NOT_FOUND
├── Unauthenticated      401  UNAUTHENTICATED
├── PermissionDenied     403  PERMISSION_DENIED
├── Overloaded           429  RESOURCE_EXHAUSTED    carries a computed retry-after
├── Unavailable          503  UNAVAILABLE           carries a retry-after
├── DeadlineExceeded     504  DEADLINE_EXCEEDED
├── RequestCancelled     499  CANCELLED
└── InternalError        500  INTERNAL              our bug; names no path, no secret
"""

from typing import ClassVar


class PagefleetError(Exception):
    """The root of the tree.

    Attributes:
        grpc_code: name of the `grpc.StatusCode`.
        http_status: HTTP status code.
        reason: short upper-case word for `google.rpc.ErrorInfo.reason`.
        retry_after_s: seconds after which a retry can succeed; None where a retry does not help.
        retry_token: shown again with that retry, it goes before newcomers; empty without one.
    """

    grpc_code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, retry_token: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.retry_token = retry_token

    def __reduce__(self) -> tuple[object, ...]:
        # Ray pickles errors between processes; subclasses have other signatures than Exception's.
        return _rebuild, (type(self), dict(self.__dict__))


def _rebuild(cls: type[PagefleetError], state: dict[str, object]) -> PagefleetError:
    error = cls.__new__(cls)
    Exception.__init__(error, state["message"])
    error.__dict__.update(state)
    return error


class InvalidArgument(PagefleetError):
    """A field of the request is wrong. `field` is its path in the public proto, dots between."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400
    reason = "INVALID_ARGUMENT"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class ModelNotFound(PagefleetError):
    """No replica serves a model of that name."""

    grpc_code = "NOT_FOUND"
    http_status = 404
    reason = "MODEL_NOT_FOUND"

    def __init__(self, model: str, known: tuple[str, ...] = ()) -> None:
        served = ", ".join(known) if known else "none"
        super().__init__(f"model {model!r} is not served here; served: {served}")
        self.model = model


class Unauthenticated(PagefleetError):
    """No API key, or one that is not known."""

    grpc_code = "UNAUTHENTICATED"
    http_status = 401
    reason = "UNAUTHENTICATED"


class PermissionDenied(PagefleetError):
    """The key is known and may not do this."""

    grpc_code = "PERMISSION_DENIED"
    http_status = 403
    reason = "PERMISSION_DENIED"


class Overloaded(PagefleetError):
    """Queue full or over quota; `retry_after_s` is computed from the forecast of releases."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429
    reason = "OVERLOADED"


class Unavailable(PagefleetError):
    """No replica is ready, or a stream could not be resumed elsewhere."""

    grpc_code = "UNAVAILABLE"
    http_status = 503
    reason = "UNAVAILABLE"


class DeadlineExceeded(PagefleetError):
    """The request's deadline passed, queued or running."""

    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504
    reason = "DEADLINE_EXCEEDED"


class RequestCancelled(PagefleetError):
    """The client went away or cancelled."""

    grpc_code = "CANCELLED"
    http_status = 499
    reason = "CANCELLED"


class InternalError(PagefleetError):
    """A fault of ours; details stand in the server's log under the request id."""


_BY_NAME: dict[str, type[PagefleetError]] = {
    error.__name__: error
    for error in (
        Unauthenticated,
        PermissionDenied,
        Overloaded,
        Unavailable,
        DeadlineExceeded,
        RequestCancelled,
    )
}


def error_named(
    name: str, message: str, *, retry_after_s: float | None = None, retry_token: str = ""
) -> PagefleetError:
    """The error that another process named (`Refused.error`, `SequenceDelta.error_class`).

    An InvalidArgument's message is "field: problem", as its own constructor writes it. A name
    that is not of this tree is a fault of ours.
    """
    if name == InvalidArgument.__name__:
        field, separator, problem = message.partition(": ")
        has_field = bool(separator) and " " not in field
        return InvalidArgument(field, problem) if has_field else InvalidArgument("request", message)
    if name == ModelNotFound.__name__:
        error = ModelNotFound("")
        error.message = message
        return error
    kind = _BY_NAME.get(name, InternalError)
    return kind(message, retry_after_s=retry_after_s, retry_token=retry_token)
