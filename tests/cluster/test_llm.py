"""The in-process model, on a tiny checkpoint with a byte tokenizer."""

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny_model import make_tiny_model

from pagefleet.cluster.llm import LLM, EngineOptions
from pagefleet.protos.errors import InvalidArgument, Unavailable
from pagefleet.protos.messages import FinishReason, SamplingParams
from pagefleet.workers.config import WorkerConfig
from pagefleet.workers.model_runner import ModelRunner

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), num_blocks=256, deterministic=True, num_threads=1) as llm:
        yield llm
        stats = llm.stats()
        assert (stats.device.referenced, stats.device.fenced) == (0, 0)
    assert not [t for t in threading.enumerate() if t.name.startswith("pagefleet-engine")]


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["Once upon a time", "x", "A longer prompt, which takes more blocks than one. " * 3]
    together = llm.generate(prompts, GREEDY)
    assert [len(completion.token_ids) for completion in together] == [24] * 3
    for prompt, completion in zip(prompts, together, strict=True):
        (alone,) = llm.generate(prompt, GREEDY)
        assert alone.token_ids == completion.token_ids
        assert alone.text == completion.text
    assert all(c.outputs[0].finish_reason is FinishReason.LENGTH for c in together)


def test_a_prompt_seen_before_is_found_in_the_cache(llm: LLM) -> None:
    prompt = "The same beginning for everyone, long enough for some blocks."
    (cold,) = llm.generate([prompt], GREEDY)
    (warm,) = llm.generate([prompt], GREEDY)
    assert cold.outputs[0].usage.cached_tokens == 0
    assert warm.outputs[0].usage.cached_tokens == len(warm.prompt_token_ids) // 16 * 16
    assert warm.token_ids == cold.token_ids


def test_samples_of_one_prompt_differ_and_repeat_with_their_seed(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=1.0, n=4, seed=5, ignore_eos=True)
    (first,) = llm.generate(["abc"], sampling)
    (second,) = llm.generate(["abc"], sampling)
    texts = [output.token_ids for output in first.outputs]
    assert texts == [output.token_ids for output in second.outputs]
    assert len(set(texts)) > 1
    assert [output.index for output in first.outputs] == [0, 1, 2, 3]


def test_an_unset_seed_is_drawn(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=24, temperature=1.5, ignore_eos=True)
    completions = llm.generate(["abc"] * 4, sampling)
    assert len({completion.token_ids for completion in completions}) > 1


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (whole,) = llm.generate(["stop here"], GREEDY)
    stop = whole.text[5:8]
    stopping = dataclasses.replace(GREEDY, stop=(stop,))
    (stopped,) = llm.generate(["stop here"], stopping)
    assert stopped.outputs[0].finish_reason is FinishReason.STOP
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
    assert stopped.outputs[0].usage.completion_tokens == len(stopped.token_ids)


def test_token_ids_are_taken_as_they_are_and_logprobs_come_along(llm: LLM) -> None:
    sampling = dataclasses.replace(GREEDY, logprobs=2, prompt_logprobs=1, max_tokens=5)
    (completion,) = llm.generate([[10, 20, 30, 40]], sampling)
    assert completion.prompt_token_ids == (10, 20, 30, 40)
    assert len(completion.outputs[0].logprobs) == 5
    assert [entry is None for entry in completion.prompt_logprobs] == [True, False, False, False]
    for token_id, entry in zip(completion.token_ids, completion.outputs[0].logprobs, strict=True):
        assert entry.token_ids[0] == token_id
        assert entry.rank == 1


def test_chats_go_through_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(conversation, GREEDY)
    both = llm.chat([conversation, [{"role": "user", "content": "bye"}]], GREEDY)
    assert one.token_ids == both[0].token_ids
    assert len(both) == 2
    (same,) = llm.generate([one.prompt_token_ids], GREEDY)
    assert same.token_ids == one.token_ids


@pytest.mark.parametrize(
    ("prompts", "sampling", "field"),
    [
        ([""], GREEDY, "text"),
        ([[]], GREEDY, "token_ids"),
        ([[1, 100_000]], GREEDY, "token_ids.ids"),
        (["\ud83d"], GREEDY, "text"),
        (["fine", "x" * 5000], GREEDY, "text"),
        (["fine"], SamplingParams(temperature=float("nan")), "sampling.temperature"),
        (["fine"], SamplingParams(max_tokens=2**31), "sampling.max_tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(
    llm: LLM, prompts: list[str], sampling: SamplingParams, field: str
) -> None:
    steps = llm.stats().steps
    with pytest.raises(InvalidArgument) as refusal:
        llm.generate(prompts, sampling)
    assert refusal.value.field == field
    assert llm.stats().steps == steps


def test_an_array_of_token_ids_is_a_prompt(llm: LLM) -> None:
    (listed,) = llm.generate([[5, 6, 7]], GREEDY)
    (array,) = llm.generate([np.array([5, 6, 7])], GREEDY)
    assert array.prompt_token_ids == (5, 6, 7)
    assert array.token_ids == listed.token_ids


@pytest.mark.parametrize("prompt", [None, [1.5], 7])
def test_what_is_no_prompt_is_a_type_error(llm: LLM, prompt: object) -> None:
    with pytest.raises(TypeError, match="a text or token ids"):
        llm.generate([prompt])


def test_no_prompts_no_completions(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.chat([]) == []


def test_a_progress_bar_can_be_shown(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY, progress=True)
    assert "prompts" in capsys.readouterr().out


def test_an_interrupted_call_leaves_nothing_running(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "_collect", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], dataclasses.replace(GREEDY, max_tokens=1000))
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)


def test_a_failed_step_ends_the_call_and_says_what_to_do(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("the device is gone")

    with LLM(str(model), num_blocks=64, num_threads=1) as broken:
        monkeypatch.setattr(ModelRunner, "execute", fail)
        for _ in range(2):
            with pytest.raises(Unavailable, match=r"device is gone.*make a new LLM"):
                broken.generate(["a", "b"], GREEDY)


def test_a_pool_so_small_that_it_preempts_changes_no_token(model: Path, llm: LLM) -> None:
    prompts = [f"prompt number {number}, of some length" for number in range(8)]
    sampling = dataclasses.replace(GREEDY, max_tokens=60)
    expected = [completion.token_ids for completion in llm.generate(prompts, sampling)]
    with LLM(str(model), num_blocks=20, deterministic=True, num_threads=1) as tight:
        completions = tight.generate(prompts, sampling)
        assert tight.stats().preemptions > 0
    assert [completion.token_ids for completion in completions] == expected


def test_overlapped_steps_change_no_token(model: Path, llm: LLM) -> None:
    """E13: a pool that preempts, with one step always in flight."""
    prompts = [f"prompt number {number}, of some length" for number in range(8)]
    sampling = dataclasses.replace(GREEDY, max_tokens=60)
    expected = [completion.token_ids for completion in llm.generate(prompts, sampling)]
    options: EngineOptions = {"deterministic": True, "num_threads": 1, "overlap_steps": True}
    with LLM(str(model), num_blocks=20, **options) as overlapped:
        completions = overlapped.generate(prompts, sampling)
        assert overlapped.stats().preemptions > 0
    assert [completion.token_ids for completion in completions] == expected


def test_the_options_are_those_of_a_worker() -> None:
    fields = {field.name for field in dataclasses.fields(WorkerConfig)}
    of_a_cluster = {"model", "weights_version", "weights_ordered", "stream_tls"}
    assert set(EngineOptions.__annotations__) == fields - of_a_cluster
