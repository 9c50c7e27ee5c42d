"""The data plane's codec: what goes in comes out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefleet.protos import codec, engine_pb2
from pagefleet.protos.messages import (
    AdmissionClass,
    EngineRequest,
    FinishReason,
    PrefixTransfer,
    SampleStart,
    SamplingParams,
    SequenceDelta,
    TokenLogprobs,
    TraceContext,
    TransferPeer,
    Usage,
)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_token_ids_round_trip(token_ids):
    data = codec.encode_token_ids(token_ids)
    assert len(data) == 4 * len(token_ids)
    assert codec.decode_token_ids(data) == tuple(token_ids)


def test_token_ids_are_little_endian():
    assert codec.encode_token_ids([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"


def test_an_id_that_is_no_int32_is_refused():
    with pytest.raises(OverflowError):
        codec.encode_token_ids([2**31])


def full_sampling() -> SamplingParams:
    return SamplingParams(
        max_tokens=0,
        min_tokens=2,
        temperature=0.7,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        seed=2**64 - 1,
        n=3,
        stop_token_ids=(7, 8),
        ignore_eos=True,
        repetition_penalty=1.1,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias=((3, -100.0), (9, 1.5)),
        logprobs=0,
        prompt_logprobs=0,
        beam_width=4,
        length_penalty=-0.5,
    )


@pytest.mark.parametrize("sampling", [SamplingParams(seed=0), full_sampling()])
def test_a_request_survives_the_wire(sampling):
    request = EngineRequest(
        request_key="k",
        prompt_token_ids=(1, 2, 3),
        sampling=sampling,
        samples=(SampleStart(0), SampleStart(2, (5, 6))),
        lease_id=0,
        lease_blocks=9,
        admission_class=AdmissionClass.GUARANTEED,
        priority=-3,
        deadline_s=0.0,
        cache_salt="salt",
        adapter="a",
        request_id="mine",
        trace=TraceContext("00-1-2-01", "vendor=1"),
        transfer=PrefixTransfer(TransferPeer("r1", "life", ("a", "b")), 512, 0.25),
    )
    data = codec.encode_engine_request(request).SerializeToString()
    assert codec.decode_engine_request(engine_pb2.Submit.FromString(data)) == request


def test_absent_stays_absent():
    request = EngineRequest("k", (1,), SamplingParams(seed=1), (SampleStart(0),))
    decoded = codec.decode_engine_request(codec.encode_engine_request(request))
    assert decoded.lease_id is None
    assert decoded.deadline_s is None
    assert decoded.transfer is None
    assert decoded.sampling.max_tokens is None
    assert decoded.sampling.logprobs is None


def test_text_settings_never_reach_an_engine():
    sampling = SamplingParams(seed=1, stop=("secret",), skip_special_tokens=False)
    message = codec.encode_sampling(sampling)
    assert b"secret" not in message.SerializeToString()
    assert codec.decode_sampling(message) == SamplingParams(seed=1)


def test_deltas_survive_the_wire():
    entry = TokenLogprobs((4, 9, 4), (-0.5, -1.25, -9999.0), 2)
    deltas = [
        SequenceDelta("k", 0, 0, (4, 5), (entry, entry), (None, entry)),
        SequenceDelta(
            "k",
            1,
            17,
            finish_reason=FinishReason.KV_EXHAUSTED,
            usage=Usage(10, 8, 17, 1, 0.25, 0.5, 1.5),
            error="why",
            error_class="Overloaded",
        ),
        SequenceDelta("k", 2, 0, (6,), finish_reason=FinishReason.STOP, score=0.0),
    ]
    data = codec.encode_outputs(12, deltas).SerializeToString()
    message = engine_pb2.EngineOutputs.FromString(data)
    assert message.step == 12
    assert codec.decode_outputs(message) == deltas
