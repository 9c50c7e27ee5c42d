"""Malformed requests become INVALID_ARGUMENT with a field, never an exception."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefleet.protos import inference_pb2 as pb
from pagefleet.protos.deserializer import Malformed, make_deserializer

deserialize = make_deserializer(pb.GenerateRequest, max_bytes=4096)
MARK = "MARK"


def broken(request: pb.GenerateRequest) -> bytes:
    """The request's bytes with every MARK replaced by as many bytes of invalid UTF-8."""
    return request.SerializeToString().replace(MARK.encode(), b"a\xff\xfeb")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(text=MARK), "text"),
        (pb.GenerateRequest(text="fine", cache_salt=MARK), "cache_salt"),
        (pb.GenerateRequest(sampling=pb.Sampling(stop=["a", "b", MARK])), "sampling.stop[2]"),
        (
            pb.GenerateRequest(
                chat=pb.Chat(messages=[pb.ChatMessage(role="user"), pb.ChatMessage(content=MARK)])
            ),
            "chat.messages[1].content",
        ),
    ],
)
def test_invalid_utf8_names_its_field(request_, field):
    result = deserialize(broken(request_))
    assert isinstance(result, Malformed)
    assert result.error.field == field
    assert "UTF-8" in result.error.problem


def test_a_good_request_is_returned():
    request = pb.GenerateRequest(
        text="snow \u2603", sampling=pb.Sampling(logit_bias={3: 1.0}, temperature=0.5)
    )
    assert deserialize(request.SerializeToString()) == request


def test_an_oversized_message_is_refused_before_parsing():
    result = deserialize(b"\xff" * 4097)
    assert isinstance(result, Malformed)
    assert result.error.field == "request"
    assert "4097" in result.error.problem


@pytest.mark.parametrize("data", [b"\x0a", b"\x0a\xff", b"\xff" * 11, b"\x0c", b"\x2a\x02\x82"])
def test_garbage_blames_the_whole_request(data):
    result = deserialize(data)
    assert isinstance(result, Malformed)
    assert result.error.field == "request"


@given(st.binary(max_size=300))
def test_no_bytes_raise(data):
    assert isinstance(deserialize(data), pb.GenerateRequest | Malformed)


@given(st.data())
def test_no_mutation_of_a_request_raises(data):
    request = pb.GenerateRequest(
        model="m", chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hello")])
    )
    raw = bytearray(request.SerializeToString())
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    assert isinstance(deserialize(bytes(raw)), pb.GenerateRequest | Malformed)
