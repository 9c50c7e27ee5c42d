"""Guessing ahead with a real model in deterministic mode: every answer is what it is without."""

from pathlib import Path

import pytest
from factories import convert_stories260k, find_stories260k, make_llama
from model_driver import Guesses, load_runner, serve
from request_kinds import requests_of_every_kind, without_usage

from pagefleet.cluster.llm import LLM
from pagefleet.protos.messages import FinishReason, SamplingParams
from pagefleet.scheduler.config import PreemptionMode
from pagefleet.workers.model_runner import ModelRunner


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = make_llama(tmp_path_factory.mktemp("model"), num_heads=8, tied=True)
    return load_runner(folder, num_blocks=128, block_size=4, host_memory=2**19, deterministic=True)


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("overlap", [False, True])
def test_answers_are_those_of_no_guesses(runner: ModelRunner, share: float, overlap: bool) -> None:
    requests = requests_of_every_kind()
    plain = serve(runner, requests)
    guessing = serve(runner, requests, guesses=Guesses(plain, share), overlap=overlap)
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
