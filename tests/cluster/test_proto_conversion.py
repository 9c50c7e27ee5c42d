"""What is refused by its length alone, before it is copied out of the message."""

import pytest

from pagefleet.cluster.proto_conversion import call_from_proto, tokenize_prompt_from_proto
from pagefleet.cluster.validation import RequestLimits
from pagefleet.protos import inference_pb2 as pb
from pagefleet.protos.errors import InvalidArgument

LIMITS = RequestLimits(max_stop_strings=2, max_stop_token_ids=2, max_logit_bias=2, max_messages=2)


def chat(num_messages: int) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role="user", content="x")] * num_messages)


def request(num: int, field: str) -> pb.GenerateRequest:
    if field == "chat.messages":
        return pb.GenerateRequest(chat=chat(num))
    sampling = {
        "sampling.stop": pb.Sampling(stop=["x"] * num),
        "sampling.stop_token_ids": pb.Sampling(stop_token_ids=[1] * num),
        "sampling.logit_bias": pb.Sampling(logit_bias=dict.fromkeys(range(num), 1.0)),
    }[field]
    return pb.GenerateRequest(text="x", sampling=sampling)


@pytest.mark.parametrize(
    "field", ["sampling.stop", "sampling.stop_token_ids", "sampling.logit_bias", "chat.messages"]
)
def test_too_many_entries_are_refused_uncopied(field: str) -> None:
    call_from_proto(request(2, field), LIMITS, tenant="", deadline_s=None, retry_token="")
    with pytest.raises(InvalidArgument, match="more than 2 entries") as refusal:
        call_from_proto(request(3, field), LIMITS, tenant="", deadline_s=None, retry_token="")
    assert refusal.value.field == field


def test_too_many_messages_to_tokenize() -> None:
    tokenize_prompt_from_proto(pb.TokenizeRequest(chat=chat(2)), LIMITS)
    with pytest.raises(InvalidArgument, match="more than 2 entries"):
        tokenize_prompt_from_proto(pb.TokenizeRequest(chat=chat(3)), LIMITS)
