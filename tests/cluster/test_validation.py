"""Sampling values and fields that no engine may see, each with the field it is blamed on."""

import math
from dataclasses import replace

import pytest
from cluster_factories import make_card, make_info

from pagefleet.cluster.generation import GenerateCall, TextPrompt
from pagefleet.cluster.validation import RequestLimits, check_call, check_token_ids
from pagefleet.protos.errors import InvalidArgument
from pagefleet.protos.messages import AdmissionClass, SamplingParams

CALL = GenerateCall(TextPrompt("x"))
NAN, INF = math.nan, math.inf


def check(**sampling: object) -> None:
    check_call(replace(CALL, sampling=SamplingParams(**sampling)), RequestLimits())


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [-1, 2**32, 10**400, 4.5, "4"]),
        ("min_tokens", [-1, 10**400]),
        ("temperature", [-0.1, NAN, INF, -INF, 1e30]),
        ("top_k", [-1, 2**31, 10**5000, 2.5]),
        ("top_p", [0.0, -0.5, 1.1, NAN, INF]),
        ("min_p", [-0.1, 1.1, NAN]),
        ("seed", [-1, 2**64, 10**400, 2.5]),
        ("n", [0, -1, 129, 4096, 10**400, 2.0]),
        ("repetition_penalty", [0.0, 1e-300, 1e-39, -1.0, NAN, INF, 11.0]),
        ("presence_penalty", [-3.0, 2.5, NAN]),
        ("frequency_penalty", [-3.0, 2.5, INF]),
        ("logprobs", [-1, 21, 2.5]),
        ("prompt_logprobs", [-1, 21, 2.5]),
        ("logit_bias", [((1, NAN),), ((1, 101.0),), tuple((i, 0.0) for i in range(2000))]),
        ("stop", ["abc", ("",), ("a",) * 65, ("x" * 5000,), ("\ud800",)]),
        ("stop_token_ids", [tuple(range(300))]),
        ("beam_width", [-1, 17, 10**400, 2.0]),
        ("length_penalty", [NAN, INF, -11.0]),
    ],
)
def test_absurd_sampling_is_refused(field, values):
    for value in values:
        with pytest.raises(InvalidArgument) as caught:
            check(**{field: value})
        assert caught.value.field == f"sampling.{field}", value


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 0},
        {"max_tokens": 1},
        {"max_tokens": 2**31},
        {"temperature": 0.0},
        {"temperature": 1e-9},
        {"temperature": 1e-4},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"n": 128},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 1e-3},
        {"top_p": 1e-9, "top_k": 1, "min_p": 1.0},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"beam_width": 16, "n": 16, "temperature": 0.0, "length_penalty": -10.0},
        {"beam_width": 1, "temperature": 0.7, "logprobs": 2},
    ],
)
def test_extreme_but_sound_sampling_passes(sampling):
    check(**sampling)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 5),
        ("temperature", 0.7),
        ("top_k", 3),
        ("top_p", 0.5),
        ("min_p", 0.1),
        ("stop", ("x",)),
        ("logprobs", 0),
    ],
)
def test_what_a_beam_search_cannot_do_is_refused(field, value):
    with pytest.raises(InvalidArgument) as caught:
        check(beam_width=4, **{field: value})
    assert caught.value.field == f"sampling.{field}"


def test_a_grammar_and_a_resume_are_refused_with_beams():
    with pytest.raises(InvalidArgument, match="response_format"):
        check(beam_width=4, grammar="start: /a/")
    beams = replace(CALL, sampling=SamplingParams(beam_width=2), resume_token_ids=(1,))
    with pytest.raises(InvalidArgument, match="resume_token_ids"):
        check_call(beams, RequestLimits())


def test_min_tokens_beyond_max_tokens_is_refused():
    with pytest.raises(InvalidArgument, match="min_tokens"):
        check(min_tokens=3, max_tokens=2)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"request_id": "x" * 257}, "request_id"),
        ({"request_id": "\ud83d"}, "request_id"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"priority": 2**31}, "priority"),
        ({"priority": -(10**400)}, "priority"),
        ({"admission_class": AdmissionClass.GUARANTEED}, "sampling.max_tokens"),
        ({"resume_token_ids": (1,), "sampling": SamplingParams(n=2)}, "resume_token_ids"),
    ],
)
def test_other_fields(change, field):
    with pytest.raises(InvalidArgument) as caught:
        check_call(replace(CALL, **change), RequestLimits())
    assert caught.value.field == field


def test_the_last_token_id_is_named_where_one_beyond_it_is_refused():
    card = replace(make_card(make_info()), vocab_size=10)
    check_token_ids("ids", [0, 9], card)
    with pytest.raises(InvalidArgument, match=r"10 is no token id of .* \(0 to 9\)"):
        check_token_ids("ids", [10], card)
