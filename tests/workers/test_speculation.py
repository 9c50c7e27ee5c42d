"""Guessing ahead with a real model in deterministic mode: every answer is what it is without."""

from dataclasses import replace
from pathlib import Path

import pytest
from factories import convert_stories260k, find_stories260k, make_llama
from model_driver import GREEDY, Answer, Guesses, load_runner, make_request, random_prompt, serve

from pagefleet.cluster.llm import LLM
from pagefleet.protos.messages import EngineRequest, FinishReason, SamplingParams
from pagefleet.scheduler.config import PreemptionMode
from pagefleet.workers.model_runner import ModelRunner

VOCAB = 131
SAMPLED = SamplingParams(temperature=0.8, seed=11, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = make_llama(tmp_path_factory.mktemp("model"), num_heads=8, tied=True)
    return load_runner(folder, num_blocks=128, block_size=4, host_memory=2**19, deterministic=True)


def requests_of_every_kind() -> list[EngineRequest]:
    prompts = [random_prompt(length, VOCAB, length) for length in (5, 8, 16, 23)]
    kinds = {
        "greedy": GREEDY,
        "sampled": SAMPLED,
        "filtered": replace(SAMPLED, top_k=20, top_p=0.9, min_p=0.02),
        "penalised": replace(
            SAMPLED, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3
        ),
        "logprobs": replace(SAMPLED, logprobs=3, prompt_logprobs=2),
        "biased": replace(GREEDY, logit_bias=((7, 2.0),), logprobs=0),
        "ending": replace(SAMPLED, ignore_eos=False, stop_token_ids=tuple(range(0, 131, 9))),
        "late": replace(
            SAMPLED, ignore_eos=False, stop_token_ids=tuple(range(0, 131, 9)), min_tokens=12
        ),
    }
    requests = [
        make_request(f"{name} {place}", prompt, sampling)
        for place, prompt in enumerate(prompts)
        for name, sampling in kinds.items()
    ]
    return [*requests, make_request("three", prompts[3], replace(SAMPLED, n=3), n=3)]


def without_usage(answers: dict[tuple[str, int], Answer]) -> dict[tuple[str, int], Answer]:
    return {key: replace(answer, usage=None) for key, answer in answers.items()}


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_answers_are_those_of_no_guesses(runner: ModelRunner, share: float) -> None:
    requests = requests_of_every_kind()
    plain = serve(runner, requests)
    guessing = serve(runner, requests, guesses=Guesses(plain, share))
    assert without_usage(guessing) == without_usage(plain)
    reasons = {answer.finish_reason for answer in plain.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_answers_are_the_same_with_preemptions_too(
    runner: ModelRunner, mode: PreemptionMode
) -> None:
    requests = requests_of_every_kind()[:16]
    plain = serve(runner, requests)
    guessing = serve(
        runner,
        requests,
        num_blocks=60,
        num_host_blocks=runner.num_host_blocks,
        preemption_mode=mode,
        preempt_every=4,
        guesses=Guesses(plain, 0.8),
    )
    assert without_usage(guessing) == without_usage(plain)
    assert sum(answer.usage.preemptions for answer in guessing.values() if answer.usage) > 5


def test_a_model_that_repeats_itself_is_guessed_by_its_own_text(tmp_path: Path) -> None:
    """Through the whole engine, by its option, with text, a stop string and a grammar."""
    source = find_stories260k()
    if source is None:
        pytest.skip("stories260K is not on this machine")
    folder = convert_stories260k(source, tmp_path / "stories")
    prompts = ["Once upon a time, there was a big dog. He was a big dog. He was a big dog."] * 2
    outputs: list[list[tuple[str, tuple[int, ...], str]]] = []
    for speculative in ("off", "ngram"):
        found: list[tuple[str, tuple[int, ...], str]] = []
        with LLM(
            str(folder), deterministic=True, num_threads=1, num_blocks=64, speculative=speculative
        ) as llm:
            for sampling in (
                SamplingParams(temperature=0.0, max_tokens=120),
                SamplingParams(temperature=0.3, seed=3, max_tokens=60, n=2, logprobs=1),
                SamplingParams(temperature=0.0, max_tokens=120, stop=("dog. H",)),
                SamplingParams(temperature=0.0, max_tokens=30, grammar='start: ("a" | "b")*'),
            ):
                for completion in llm.generate(prompts, sampling):
                    found += [
                        (o.text, o.token_ids, o.finish_reason.value) for o in completion.outputs
                    ]
            stats = llm.stats()
        outputs.append(found)
        assert (stats.accepted_tokens > 100) == (speculative == "ngram"), stats
        assert stats.accepted_tokens <= stats.draft_tokens
    assert outputs[0] == outputs[1]
