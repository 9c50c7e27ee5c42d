"""Beam search on the model runner against transformers: the same sequences, the same scores."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from factories import make_llama
from model_driver import Answer, load_runner, make_request, random_prompt, serve
from transformers import AutoModelForCausalLM, PreTrainedModel

from pagefleet.protos.messages import FinishReason, SamplingParams
from pagefleet.scheduler.config import PreemptionMode
from pagefleet.workers.model_runner import ModelRunner

VOCAB = 48
ENDS = [7, 11, 20, 33, 40]  # so many that some beams end early and some do not
PROMPTS = [random_prompt(length, VOCAB, seed=length) for length in (5, 16, 33)]

Hypotheses = list[tuple[list[int], float]]
Oracle = Callable[..., Hypotheses]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(
        tmp_path_factory.mktemp("models") / "tiny", vocab_size=VOCAB, eos_token_id=ENDS, scale=0.7
    )


@pytest.fixture(scope="module")
def runner(folder: Path):
    runner = load_runner(folder, block_size=4, num_blocks=256, host_memory=2**20)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def best(prompt: list[int], width: int, max_tokens: int, **settings: object) -> Hypotheses:
        generated = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_tokens,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **settings,
        )
        return [
            (up_to_end(tokens[len(prompt) :], settings.get("eos_token_id", ENDS)), score)
            for tokens, score in zip(
                generated.sequences.tolist(), generated.sequences_scores.tolist(), strict=True
            )
        ]

    return best


def up_to_end(tokens: list[int], ends: object) -> list[int]:
    found = [at for at, token in enumerate(tokens) if token in ENDS and ends is not None]
    return tokens[: found[0] + 1] if found else tokens


def beams(width: int, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, beam_width=width, n=width, **fields)  # pyright: ignore


def found(answers: dict[tuple[str, int], Answer], key: str, width: int) -> Hypotheses:
    chosen = [answers[key, index] for index in range(width)]
    assert not any(answer.error for answer in chosen)
    return [(answer.token_ids, answer.score or 0.0) for answer in chosen]


def assert_equal(hypotheses: Hypotheses, expected: Hypotheses) -> None:
    assert [tokens for tokens, _ in hypotheses] == [tokens for tokens, _ in expected]
    assert [s for _, s in hypotheses] == pytest.approx([s for _, s in expected], abs=2e-4)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -0.5])
@pytest.mark.parametrize("width", [2, 3, 8])
def test_beams_equal_transformers(
    runner: ModelRunner, oracle: Oracle, width: int, length_penalty: float
) -> None:
    sampling = beams(width, length_penalty=length_penalty, max_tokens=14)
    requests = [make_request(str(i), prompt, sampling) for i, prompt in enumerate(PROMPTS)]
    answers = serve(runner, requests)
    reasons: set[FinishReason | None] = set()
    for number, prompt in enumerate(PROMPTS):
        expected = oracle(prompt, width, 14, length_penalty=length_penalty)
        assert_equal(found(answers, str(number), width), expected)
        reasons |= {answers[str(number), index].finish_reason for index in range(width)}
    assert FinishReason.STOP in reasons


def test_ends_that_do_not_count(runner: ModelRunner, oracle: Oracle) -> None:
    answers = serve(
        runner, [make_request("a", PROMPTS[1], beams(4, ignore_eos=True, max_tokens=20))]
    )
    expected = oracle(PROMPTS[1], 4, 20, eos_token_id=None)
    assert_equal(found(answers, "a", 4), expected)
    assert all(len(tokens) == 20 for tokens, _ in expected)


def test_no_end_too_early(runner: ModelRunner, oracle: Oracle) -> None:
    sampling = beams(4, max_tokens=16, min_tokens=6)
    answers = serve(runner, [make_request("a", PROMPTS[0], sampling)])
    assert_equal(found(answers, "a", 4), oracle(PROMPTS[0], 4, 16, min_new_tokens=6))


def test_penalties(runner: ModelRunner, oracle: Oracle) -> None:
    sampling = beams(3, max_tokens=16, repetition_penalty=1.3)
    answers = serve(runner, [make_request("a", PROMPTS[2], sampling)])
    assert_equal(found(answers, "a", 3), oracle(PROMPTS[2], 3, 16, repetition_penalty=1.3))


@pytest.mark.parametrize("mode", list(PreemptionMode))
def test_in_a_pool_that_cannot_hold_them_all(
    runner: ModelRunner, oracle: Oracle, mode: PreemptionMode
) -> None:
    """Beams of several prompts and plain samples, preempted again and again."""
    sampling = beams(4, max_tokens=14)
    requests = [make_request(str(i), prompt, sampling) for i, prompt in enumerate(PROMPTS)]
    requests += [
        make_request(f"plain{i}", prompt, SamplingParams(temperature=0.0, max_tokens=14))
        for i, prompt in enumerate(PROMPTS)
    ]
    answers = serve(
        runner,
        requests,
        num_blocks=26,
        num_host_blocks=runner.num_host_blocks,
        prefill_chunk=5,
        preemption_mode=mode,
    )
    for number, prompt in enumerate(PROMPTS):
        assert_equal(found(answers, str(number), 4), oracle(prompt, 4, 14))
    used = [answer.usage for answer in answers.values() if answer.usage is not None]
    assert sum(usage.preemptions for usage in used) > 0


def test_a_prompt_found_in_the_cache(runner: ModelRunner, oracle: Oracle) -> None:
    sampling = beams(3, max_tokens=10)
    once = [make_request(f"{i}", PROMPTS[2], sampling) for i in range(2)]
    answers = serve(runner, once, max_num_batched_tokens=24)
    expected = oracle(PROMPTS[2], 3, 10)
    for key in ("0", "1"):
        assert_equal(found(answers, key, 3), expected)
    usage = answers["1", 0].usage
    assert usage is not None and usage.cached_tokens > 0


def test_fewer_than_beams_are_told(runner: ModelRunner, oracle: Oracle) -> None:
    sampling = SamplingParams(temperature=0.0, beam_width=4, n=2, max_tokens=12)
    answers = serve(runner, [make_request("a", PROMPTS[1], sampling)])
    assert set(answers) == {("a", 0), ("a", 1)}
    assert_equal(found(answers, "a", 2), oracle(PROMPTS[1], 4, 12)[:2])
