"""Refusing what no engine should see: every field of a call, named as the public proto names it.

Knows limits and the model's card; touches no tokenizer, replica or queue. What passes here can
neither crash a step nor give a NaN.
"""

import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass

from ..protos.errors import InvalidArgument
from ..protos.messages import AdmissionClass, ModelCard, SamplingParams
from .generation import ChatPrompt, GenerateCall

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Upper bounds of a single request, whatever the model."""

    max_num_samples: int = 128
    max_beam_width: int = 16
    max_logprobs: int = 20
    max_stop_strings: int = 64
    max_stop_characters: int = 4096
    max_stop_token_ids: int = 256
    max_logit_bias: int = 1024
    max_messages: int = 8192
    max_name_characters: int = 256


def check_call(call: GenerateCall, limits: RequestLimits) -> None:
    """All that can be said before the model is known."""
    _check_sampling(call.sampling, limits)
    if isinstance(call.prompt, ChatPrompt):
        check_num("chat.messages", call.prompt.messages, limits.max_messages)
    for field, value in (("request_id", call.request_id), ("cache_salt", call.cache_salt)):
        check_text(field, value)
        if len(value) > limits.max_name_characters:
            raise InvalidArgument(field, f"longer than {limits.max_name_characters} characters")
    _check_count("priority", call.priority, -(2**31), 2**31 - 1)
    if call.admission_class is AdmissionClass.GUARANTEED and call.sampling.max_tokens is None:
        raise InvalidArgument("sampling.max_tokens", "admission class guaranteed needs it")
    if call.resume_token_ids and call.sampling.n != 1:
        raise InvalidArgument("resume_token_ids", "needs n = 1")
    if call.resume_token_ids and call.sampling.beam_width > 1:
        raise InvalidArgument("resume_token_ids", "a beam search cannot be resumed")


def check_for_model(
    call: GenerateCall, prompt: Sequence[int], card: ModelCard, prompt_field: str
) -> None:
    """Token ids and lengths against the model; `prompt_field` names where the prompt came from."""
    if not prompt:
        raise InvalidArgument(prompt_field, "the prompt is empty")
    _check_length(call, len(prompt), card, prompt_field)  # first: it looks at no token
    if prompt_field == "token_ids":
        check_token_ids("token_ids.ids", prompt, card)
    check_token_ids("resume_token_ids", call.resume_token_ids, card)
    check_token_ids("sampling.stop_token_ids", call.sampling.stop_token_ids, card)
    check_token_ids("sampling.logit_bias", [i for i, _ in call.sampling.logit_bias], card)


def check_token_ids(field: str, token_ids: Sequence[int], card: ModelCard) -> None:
    """Each id names a row of the model's embedding."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < card.vocab_size):
        return
    wrong = next(i for i in token_ids if not 0 <= i < card.vocab_size)
    known = f"0 to {card.vocab_size - 1}"
    raise InvalidArgument(field, f"{wrong} is no token id of {card.model} ({known})")


def check_num(field: str, entries: Sized, max_num: int) -> None:
    """Looks at no entry, so that a front can ask before it copies them."""
    if len(entries) > max_num:
        raise InvalidArgument(field, f"more than {max_num} entries")


def check_text(field: str, text: str) -> None:
    """Lone surrogates, which JSON can carry, are no text: nothing could encode them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidArgument(field, "not valid Unicode: it has a lone surrogate") from None


def _check_length(
    call: GenerateCall, num_prompt_tokens: int, card: ModelCard, prompt_field: str
) -> None:
    room = card.max_context - num_prompt_tokens
    max_tokens = call.sampling.max_tokens
    if room < 0 or (room == 0 and max_tokens != 0):
        raise InvalidArgument(
            prompt_field,
            f"{num_prompt_tokens} tokens; {card.model} takes {card.max_context}, "
            "prompt and output together",
        )
    if max_tokens is not None and max_tokens > room:
        raise InvalidArgument(
            "sampling.max_tokens",
            f"{max_tokens} behind {num_prompt_tokens} prompt tokens exceed the context of "
            f"{card.max_context}; at most {room} are left",
        )
    if len(call.resume_token_ids) > room:
        raise InvalidArgument(
            "resume_token_ids", f"longer than the context leaves room for: {room}"
        )


def _check_sampling(sampling: SamplingParams, limits: RequestLimits) -> None:
    _check_counts(sampling, limits)
    _check_distribution(sampling)
    _check_stops(sampling, limits)
    _check_beams(sampling, limits)
    check_num("sampling.logit_bias", sampling.logit_bias, limits.max_logit_bias)
    for _, bias in sampling.logit_bias:
        _check_range("sampling.logit_bias", bias, -100.0, 100.0)


def _check_counts(sampling: SamplingParams, limits: RequestLimits) -> None:
    if sampling.max_tokens is not None:
        _check_count("sampling.max_tokens", sampling.max_tokens, 0, 2**32 - 1)
    _check_count("sampling.min_tokens", sampling.min_tokens, 0, 2**32 - 1)
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise InvalidArgument("sampling.min_tokens", "more than max_tokens")
    _check_count("sampling.n", sampling.n, 1, limits.max_num_samples)
    if sampling.seed is not None:
        _check_count("sampling.seed", sampling.seed, 0, MAX_SEED)
    if sampling.logprobs is not None:
        _check_count("sampling.logprobs", sampling.logprobs, 0, limits.max_logprobs)
    if sampling.prompt_logprobs is not None:
        _check_count("sampling.prompt_logprobs", sampling.prompt_logprobs, 0, limits.max_logprobs)


def _check_distribution(sampling: SamplingParams) -> None:
    _check_range("sampling.temperature", sampling.temperature, 0.0, 100.0)
    _check_count("sampling.top_k", sampling.top_k, 0, 2**31 - 1)
    _check_range("sampling.top_p", sampling.top_p, 0.0, 1.0, above=True)
    _check_range("sampling.min_p", sampling.min_p, 0.0, 1.0)
    _check_range("sampling.repetition_penalty", sampling.repetition_penalty, 1e-3, 10.0)
    _check_range("sampling.presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _check_range("sampling.frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)


def _check_stops(sampling: SamplingParams, limits: RequestLimits) -> None:
    if isinstance(sampling.stop, str):  # each of its characters would count as one
        raise InvalidArgument("sampling.stop", "must be a tuple of strings, is a string")
    check_num("sampling.stop", sampling.stop, limits.max_stop_strings)
    if sum(map(len, sampling.stop)) > limits.max_stop_characters:
        raise InvalidArgument(
            "sampling.stop", f"more than {limits.max_stop_characters} characters in all"
        )
    for stop in sampling.stop:
        if not stop:
            raise InvalidArgument("sampling.stop", "a stop string is empty")
        check_text("sampling.stop", stop)
    check_num("sampling.stop_token_ids", sampling.stop_token_ids, limits.max_stop_token_ids)


def _check_beams(sampling: SamplingParams, limits: RequestLimits) -> None:
    """Beam search looks at every token and knows its results only at its end."""
    _check_count("sampling.beam_width", sampling.beam_width, 0, limits.max_beam_width)
    _check_range("sampling.length_penalty", sampling.length_penalty, -10.0, 10.0)
    if sampling.beam_width <= 1:
        return
    if sampling.n > sampling.beam_width:
        raise InvalidArgument("sampling.n", f"more than the {sampling.beam_width} beams")
    excluded = {
        "temperature": sampling.temperature not in (0.0, 1.0),
        "top_k": sampling.top_k != 0,
        "top_p": sampling.top_p != 1.0,
        "min_p": sampling.min_p != 0.0,
        "stop": bool(sampling.stop),
        "logprobs": sampling.logprobs is not None,
        "response_format": bool(sampling.grammar),
    }
    for field in (field for field, is_set in excluded.items() if is_set):
        raise InvalidArgument(f"sampling.{field}", "cannot be used with beam search")


def _check_count(field: str, value: int, low: int, high: int) -> None:
    """Python's callers may bring anything; JSON brings integers that no float can hold."""
    if not isinstance(value, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(field, f"must be an integer, is {value!r}")
    if not low <= value <= high:
        shown = value if value.bit_length() <= 128 else f"a number of {value.bit_length()} bits"
        raise InvalidArgument(field, f"must be at least {low} and at most {high}, is {shown}")


def _check_range(field: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """`low` itself is refused if `above`. NaN is in no range."""
    if math.isnan(value) or not low <= value <= high or (above and value == low):
        bound = "above" if above else "at least"
        raise InvalidArgument(field, f"must be {bound} {low} and at most {high}, is {value}")
