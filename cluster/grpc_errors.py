"""The error tree on gRPC: status code, short details, `google.rpc` details, the retry trailer.

Both directions: the server writes a `PagefleetError` into a status, the client reads it back.
"""

# pyright: reportMissingTypeStubs=false
from collections.abc import Sequence

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from ..protos import errors
from ..protos.errors import InvalidArgument, PagefleetError

RETRY_TRAILER = "retry-after-ms"
DETAILS_TRAILER = "grpc-status-details-bin"
_DOMAIN = "pagefleet"
# Trailers have to fit one header frame, percent-encoded and twice: as details and as status.
_MAX_MESSAGE = 500

Metadata = Sequence[tuple[str, str | bytes]]

_CLASSES: dict[str, type[PagefleetError]] = {
    kind.grpc_code: kind
    for kind in (
        errors.ModelNotFound,
        errors.Unauthenticated,
        errors.PermissionDenied,
        errors.Overloaded,
        errors.Unavailable,
        errors.DeadlineExceeded,
        errors.RequestCancelled,
    )
}


def status_of(error: PagefleetError) -> tuple[grpc.StatusCode, str, Metadata]:
    """Code, details and trailers of an error."""
    code = grpc.StatusCode[error.grpc_code]
    message = shorten(error.message)
    status = status_pb2.Status(code=code.value[0], message=message, details=_details(error))
    trailers: list[tuple[str, str | bytes]] = [(DETAILS_TRAILER, status.SerializeToString())]
    if error.retry_after_s is not None:
        trailers.append((RETRY_TRAILER, str(round(error.retry_after_s * 1000))))
    return code, message, tuple(trailers)


def shorten(text: str) -> str:
    """At most `_MAX_MESSAGE` characters, whole ones."""
    return text if len(text) <= _MAX_MESSAGE else text[: _MAX_MESSAGE - 1] + "…"


def _details(error: PagefleetError) -> list[AnyMessage]:
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=_DOMAIN)
    if error.retry_token:
        info.metadata["retry_token"] = error.retry_token
    details = [_pack(info)]
    if isinstance(error, InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=shorten(error.problem)
        )
        details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    return details


def _pack(
    message: error_details_pb2.ErrorInfo
    | error_details_pb2.BadRequest
    | error_details_pb2.RetryInfo,
) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


def error_from(code: grpc.StatusCode, details: str | None, trailers: Metadata) -> PagefleetError:
    """The error a server of ours, or gRPC itself, ended a call with."""
    message = details or code.name
    field, retry_after_s, retry_token = "request", None, ""
    for name, value in trailers:
        if name == DETAILS_TRAILER and isinstance(value, bytes):
            field, retry_token = _read_details(value)
        elif name == RETRY_TRAILER and isinstance(value, str) and value.isdigit():
            retry_after_s = int(value) / 1000
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidArgument(field, message.removeprefix(f"{field}: "))
    if code is grpc.StatusCode.NOT_FOUND:
        return errors.error_named("ModelNotFound", message)
    kind = _CLASSES.get(code.name, errors.InternalError)
    return kind(message, retry_after_s=retry_after_s, retry_token=retry_token)


def _read_details(data: bytes) -> tuple[str, str]:
    """The wrong field and the retry token, where there are such."""
    field, retry_token = "request", ""
    try:
        status = status_pb2.Status.FromString(data)
    except DecodeError:
        return field, retry_token
    bad_request, info = error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(bad_request) and bad_request.field_violations:
            field = bad_request.field_violations[0].field
        elif detail.Unpack(info):
            retry_token = info.metadata.get("retry_token", "")
    return field, retry_token
