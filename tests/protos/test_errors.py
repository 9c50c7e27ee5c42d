"""The error tree: the table of statuses, and errors that travel between processes."""

import pickle

import pytest

from pagefleet.protos import errors


@pytest.mark.parametrize(
    ("error", "grpc_code", "http_status"),
    [
        (errors.InvalidArgument("f", "p"), "INVALID_ARGUMENT", 400),
        (errors.ModelNotFound("m", ("a", "b")), "NOT_FOUND", 404),
        (errors.Unauthenticated("x"), "UNAUTHENTICATED", 401),
        (errors.PermissionDenied("x"), "PERMISSION_DENIED", 403),
        (errors.Overloaded("x", retry_after_s=1.5, retry_token="t"), "RESOURCE_EXHAUSTED", 429),
        (errors.Unavailable("x", retry_after_s=0.0), "UNAVAILABLE", 503),
        (errors.DeadlineExceeded("x"), "DEADLINE_EXCEEDED", 504),
        (errors.RequestCancelled("x"), "CANCELLED", 499),
        (errors.InternalError("x"), "INTERNAL", 500),
    ],
)
def test_statuses_and_pickling(error, grpc_code, http_status):
    assert (error.grpc_code, error.http_status) == (grpc_code, http_status)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.__dict__ == error.__dict__
    assert str(copy) == str(error)


def test_an_error_is_made_from_its_name():
    error = errors.error_named("Overloaded", "full", retry_after_s=2.0, retry_token="t")
    assert type(error) is errors.Overloaded
    assert (error.retry_after_s, error.retry_token) == (2.0, "t")
    assert type(errors.error_named("ModelNotFound", "no x")) is errors.ModelNotFound
    assert errors.error_named("ModelNotFound", "no x").message == "no x"
    assert type(errors.error_named("KeyError", "?")) is errors.InternalError


def test_a_named_invalid_argument_finds_its_field_again():
    original = errors.InvalidArgument("sampling.n", "must be: small")
    error = errors.error_named("InvalidArgument", original.message)
    assert isinstance(error, errors.InvalidArgument)
    assert (error.field, error.problem) == ("sampling.n", "must be: small")
    without = errors.error_named("InvalidArgument", "this can never fit: 3 blocks")
    assert isinstance(without, errors.InvalidArgument)
    assert without.field == "request"
