"""Whole requests through scheduler and model runner, against transformers and against themselves.

Whatever the batch, the chunks, the cache and the preemptions: the tokens are those of the
request alone.
"""

import ctypes
import itertools
import mmap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from factories import LlamaShape, convert_stories260k, find_stories260k, make_llama
from model_driver import (
    GREEDY,
    Answer,
    HandWritten,
    load_runner,
    make_request,
    random_prompt,
    serve,
)
from transformers import AutoModelForCausalLM, PreTrainedModel

from pagefleet.cluster import default_model
from pagefleet.protos.messages import FinishReason, SamplingParams
from pagefleet.scheduler.config import PreemptionMode
from pagefleet.workers.memory import NotEnoughMemory, available_memory
from pagefleet.workers.model_runner import ModelRunner

NEAR_TIE = 1e-4
LONG = replace(GREEDY, max_tokens=256)
SAMPLED = SamplingParams(
    temperature=1.0,
    seed=7,
    max_tokens=48,
    ignore_eos=True,
    top_k=40,
    top_p=0.95,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logprobs=1,
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = LlamaShape(num_heads=8, num_kv_heads=2, head_dim=16, tied=True, max_position=1024)
    return make_llama(tmp_path_factory.mktemp("llama") / "model", shape)


def load_reference(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def assert_greedy(model: PreTrainedModel, prompt: list[int], answer: Answer) -> None:
    """Every token is transformers' best after the tokens before it, near ties apart."""
    tokens = [*prompt, *answer.token_ids]
    logits = model(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer.token_ids).unsqueeze(1)).flatten()
    behind = logits.amax(-1) - chosen
    assert (behind <= NEAR_TIE).all(), f"token {int(behind.argmax())} is behind by {behind.max()}"


def mixed_prompts(vocab_size: int, count: int = 16) -> list[list[int]]:
    """Mixed lengths; some share a beginning, one is an exact number of blocks."""
    shared = random_prompt(48, vocab_size, 99)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 47, 64, 65, 80, 100, 3, 7, 48][:count]
    prompts = [random_prompt(length, vocab_size, seed) for seed, length in enumerate(lengths)]
    return [shared[: i * 6] + p if i % 3 == 0 else p for i, p in enumerate(prompts)]


def serve_all(
    runner: ModelRunner, prompts: list[list[int]], sampling: SamplingParams, **how: object
) -> list[Answer]:
    requests = [make_request(f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
    answers = serve(runner, requests, **how)  # pyright: ignore
    return [answers[f"r{i}", 0] for i in range(len(prompts))]


def num_preemptions(answers: list[Answer]) -> int:
    return sum(answer.usage.preemptions for answer in answers if answer.usage)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"enable_prefix_caching": False},
        {"prefill_chunk": 7},
        {"num_blocks": 40},
        {"num_blocks": 40, "prefill_chunk": 16, "enable_prefix_caching": False},
        {"num_blocks": 40, "num_host_blocks": 60, "preemption_mode": PreemptionMode.SWAP},
    ],
    ids=str,
)
def test_a_batch_says_what_transformers_says(
    llama: Path, kernels: str, how: dict[str, object]
) -> None:
    runner = load_runner(llama, num_blocks=256, host_memory=2**20)
    prompts = mixed_prompts(131)
    answers = serve_all(runner, prompts, replace(GREEDY, max_tokens=40), **how)
    if "num_blocks" in how:
        assert num_preemptions(answers) > 0
    model = load_reference(llama)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == 40
        assert answer.finish_reason is FinishReason.LENGTH
        assert_greedy(model, prompt, answer)


def test_a_request_alone_says_what_transformers_says(llama: Path, kernels: str) -> None:
    runner = load_runner(llama)
    prompt = random_prompt(37, 131)
    answer = serve_all(runner, [prompt], LONG)[0]
    assert len(answer.token_ids) == 256
    assert_greedy(load_reference(llama), prompt, answer)


def token_matrix() -> Iterator[ParameterSet]:
    """Chunk, pool and cache in every combination; four that cover each value are not exhaustive."""
    diagonal = {(1, 512, True), (7, 90, False), (16, 90, True), (64, 512, False)}
    for case in itertools.product((1, 7, 16, 64), (512, 90), (True, False)):
        yield pytest.param(*case, marks=() if case in diagonal else pytest.mark.exhaustive)


@pytest.mark.slow
@pytest.mark.parametrize(("prefill_chunk", "num_blocks", "prefix_caching"), list(token_matrix()))
@pytest.mark.parametrize("name", ["llama", "stories260K"])
def test_256_tokens_of_16_requests_equal_transformers(
    name: str,
    prefill_chunk: int,
    num_blocks: int,
    prefix_caching: bool,
    llama: Path,
    tmp_path: Path,
    kernels: str,
) -> None:
    folder = llama if name == "llama" else make_stories(tmp_path)
    check_256_tokens(folder, num_blocks, prefill_chunk, prefix_caching)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("num_blocks", [512, 90])
@pytest.mark.parametrize("prefill_chunk", [1, 7, 16, 64])
def test_256_tokens_of_the_default_model_equal_transformers(
    prefill_chunk: int, num_blocks: int, prefix_caching: bool
) -> None:
    check_256_tokens(default_folder(), num_blocks, prefill_chunk, prefix_caching)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("prefill_chunk", [1, 7, 16, 64])
def test_the_default_model_alone_says_what_transformers_says(prefill_chunk: int) -> None:
    runner = load_runner(default_folder(), num_threads=2, max_context=512)
    prompt = random_prompt(100, runner.model_info.vocab_size)
    answer = serve_all(runner, [prompt], LONG, prefill_chunk=prefill_chunk)[0]
    assert len(answer.token_ids) == 256
    assert_greedy(load_reference(default_folder()), prompt, answer)


def default_folder() -> Path:
    if not default_model.is_cached():
        pytest.skip("the default model was not fetched")
    return default_model.folder()


def make_stories(folder: Path) -> Path:
    source = find_stories260k()
    if source is None:
        pytest.skip("stories260K is not on this machine")
    return convert_stories260k(source, folder / "stories")


def check_256_tokens(
    folder: Path, num_blocks: int, prefill_chunk: int, prefix_caching: bool
) -> None:
    """16 requests of mixed lengths; 90 blocks are too few for all of them at once."""
    runner = load_runner(folder, num_blocks=512, num_threads=2, max_context=512)
    prompts = mixed_prompts(runner.model_info.vocab_size)
    answers = serve_all(
        runner,
        prompts,
        LONG,
        num_blocks=num_blocks,
        prefill_chunk=prefill_chunk,
        enable_prefix_caching=prefix_caching,
    )
    assert (num_preemptions(answers) > 0) == (num_blocks == 90)
    model = load_reference(folder)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == 256
        assert_greedy(model, prompt, answer)


def test_sampling_repeats_after_preemption_in_any_batch_and_chunk(
    llama: Path, kernels: str
) -> None:
    runner = load_runner(llama, num_blocks=256, host_memory=2**20, deterministic=True)
    prompts = mixed_prompts(131, count=8)
    alone = [serve_all(runner, [prompt], SAMPLED)[0] for prompt in prompts]
    swap = {"num_host_blocks": 60, "preemption_mode": PreemptionMode.SWAP}
    for how in (
        {},
        {"num_blocks": 24},
        {"num_blocks": 24, "prefill_chunk": 5},
        {"num_blocks": 24, **swap},
    ):
        answers = serve_all(runner, prompts, SAMPLED, **how)
        assert (num_preemptions(answers) > 0) == ("num_blocks" in how)
        for single, together in zip(alone, answers, strict=True):
            assert together.token_ids == single.token_ids
            assert together.logprobs == single.logprobs


def test_a_row_resumed_with_its_output_continues_the_same_draws(llama: Path) -> None:
    runner = load_runner(llama, deterministic=True)
    prompt = random_prompt(21, 131)
    whole = serve_all(runner, [prompt], SAMPLED)[0].token_ids
    for said in (10, 20):
        hand = HandWritten(runner)
        tokens = prompt + whole[:said]
        row = hand.row(3, tokens, SAMPLED, num_blocks=8, num_prompt_tokens=len(prompt))
        output = runner.execute(hand.output({3: (0, len(tokens))}, [row]))
        resumed = [int(output.token_ids[0])]
        for position in range(len(tokens), len(prompt) + 47):
            output = runner.execute(hand.output({3: (position, 1)}))
            resumed.append(int(output.token_ids[0]))
        assert whole[:said] + resumed == whole


def test_samples_of_one_request_differ_repeat_and_share_their_prompt(llama: Path) -> None:
    runner = load_runner(llama, deterministic=True)
    sampling = SamplingParams(temperature=1.0, seed=2**64 - 1, max_tokens=20, ignore_eos=True, n=4)
    request = make_request("r", random_prompt(35, 131), sampling, n=4)
    first, second = serve(runner, [request]), serve(runner, [request])
    tokens = [first["r", index].token_ids for index in range(4)]
    assert len({tuple(sample) for sample in tokens}) >= 2
    assert tokens == [second["r", index].token_ids for index in range(4)]
    for index in range(4):
        alone = replace(request, samples=(request.samples[index],))
        assert serve(runner, [alone])["r", index].token_ids == tokens[index]


def test_prompt_logprobs_are_complete_with_cache_chunks_and_preemption(
    llama: Path, kernels: str
) -> None:
    runner = load_runner(llama, num_blocks=128, deterministic=True)
    prompt = random_prompt(33, 131)
    sampling = replace(GREEDY, max_tokens=4, prompt_logprobs=2, logprobs=5, top_k=1)
    first = serve_all(runner, [prompt], sampling)[0]
    model = load_reference(llama)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert len(first.prompt_logprobs) == 33
    assert first.prompt_logprobs[0] is None
    for position, entry in enumerate(first.prompt_logprobs[1:], start=1):
        assert entry is not None
        assert entry.token_ids[0] == prompt[position]
        assert len(entry.token_ids) in (2, 3)
        for token, logprob in zip(entry.token_ids, entry.logprobs, strict=True):
            assert logprob == pytest.approx(float(expected[position - 1, token]), abs=1e-4)
        rank = int((expected[position - 1] > expected[position - 1, prompt[position]]).sum()) + 1
        assert entry.rank == rank
    # Twice in one run: the second request may not take a hit that skips what it must report.
    for how in ({}, {"prefill_chunk": 1}, {"prefill_chunk": 7}, {"num_blocks": 10}):
        for answer in serve_all(runner, [prompt] * 4, sampling, **how):
            assert answer.prompt_logprobs == first.prompt_logprobs
            assert answer.logprobs == first.logprobs
            assert len(answer.logprobs) == 4


def test_prompt_logprobs_of_a_long_prompt_take_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_llama(
        tmp_path / "wide",
        vocab_size=50_000,
        hidden_size=32,
        intermediate_size=32,
        num_layers=1,
        max_position=2048,
    )
    runner = load_runner(folder, num_blocks=130, max_num_batched_tokens=2048)
    rows: list[int] = []
    whole_logits = runner.decoder.logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return whole_logits(hidden)

    monkeypatch.setattr(runner.decoder, "logits", counted)
    prompt = random_prompt(2000, 50_000)
    answer = serve_all(
        runner,
        [prompt],
        replace(GREEDY, max_tokens=1, prompt_logprobs=1),
        max_num_batched_tokens=2048,
    )[0]
    assert len(answer.prompt_logprobs) == 2000
    assert sum(rows) == 2000
    assert max(rows) * 50_000 * 4 <= 64 * 2**20


@pytest.mark.parametrize(
    "odd",
    [
        {"temperature": 1e-4},
        {"temperature": 1e-9},
        {"temperature": float("inf")},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": float("nan")},
        {"presence_penalty": -3.0, "frequency_penalty": -2.0},
        {"logit_bias": ((5, float("nan")),)},
        {"logit_bias": tuple((token, float("-inf")) for token in range(131))},
        {"top_p": 1e-9},
        {"min_p": 1.0},
    ],
    ids=str,
)
def test_absurd_parameters_fail_alone_or_stay_finite(llama: Path, odd: dict[str, object]) -> None:
    runner = load_runner(llama)
    prompts = mixed_prompts(131, count=4)
    undisturbed = serve_all(runner, prompts[:3], GREEDY)
    requests = [make_request(f"r{i}", prompt) for i, prompt in enumerate(prompts[:3])]
    strange = replace(SAMPLED, max_tokens=12, **odd)  # pyright: ignore
    answers = serve(runner, [*requests, make_request("odd", prompts[3], strange)])
    for index, answer in enumerate(undisturbed):
        assert answers[f"r{index}", 0].token_ids == answer.token_ids
    answer = answers["odd", 0]
    assert answer.finish_reason in (FinishReason.LENGTH, FinishReason.ERROR)
    if answer.finish_reason is FinishReason.LENGTH:
        assert len(answer.token_ids) == 12
    for entry in answer.logprobs:
        assert np.isfinite(entry.logprobs).all()


def test_a_row_with_broken_logits_fails_alone(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load_runner(llama)
    hand = HandWritten(runner)
    rows = [hand.row(index, random_prompt(9, 131, index)) for index in range(3)]
    whole_logits = runner.decoder.logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = whole_logits(hidden).clone()
        logits[1] = float("nan")
        return logits

    good = runner.execute(hand.output(dict.fromkeys(range(3), (0, 9)), rows))
    monkeypatch.setattr(runner.decoder, "logits", broken)
    bad = runner.execute(
        hand.output(
            dict.fromkeys(range(3), (0, 9)),
            [hand.row(index, random_prompt(9, 131, index)) for index in range(3)],
        )
    )
    assert good.failed_rows == ()
    assert bad.failed_rows == (1,)
    assert bad.token_ids[[0, 2]].tolist() == good.token_ids[[0, 2]].tolist()


def test_min_tokens_keeps_the_end_back(llama: Path) -> None:
    runner = load_runner(llama)
    prompt = random_prompt(12, 131)
    bias = ((2, 1000.0), (5, 900.0))
    wants_to_end = SamplingParams(temperature=0.0, max_tokens=20, logit_bias=bias)
    ended = serve_all(runner, [prompt], wants_to_end)[0]
    assert ended.finish_reason is FinishReason.STOP
    assert len(ended.token_ids) == 1
    late = replace(wants_to_end, min_tokens=7, stop_token_ids=(5,))
    answer = serve_all(runner, [prompt], late)[0]
    assert answer.finish_reason is FinishReason.STOP
    assert len(answer.token_ids) == 8
    assert not {2, 5} & set(answer.token_ids[:7])


def resident_share(tensor: torch.Tensor) -> float:
    """Of its pages, those that the system has given."""
    page = mmap.PAGESIZE
    begin = tensor.data_ptr() // page * page
    num_bytes = tensor.data_ptr() + tensor.numel() * tensor.element_size() - begin
    pages = (ctypes.c_ubyte * -(-num_bytes // page))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), pages) == 0
    return sum(page & 1 for page in pages) / len(pages)


def test_a_pool_of_a_named_size_has_its_memory_before_the_first_step(llama: Path) -> None:
    named = load_runner(llama, num_blocks=None, kv_memory=32 << 20)
    assert resident_share(named.storage.pool) == 1.0
    left = load_runner(llama, num_blocks=None, memory_fraction=0.25)
    assert resident_share(left.storage.pool) < 0.2, "what nobody named is taken as it is used"


def test_a_named_pool_that_memory_has_no_room_for_is_refused(llama: Path) -> None:
    with pytest.raises(NotEnoughMemory, match=r"--kv-memory.* are free"):
        load_runner(llama, num_blocks=None, kv_memory=2 * available_memory())


def test_a_measurement_leaves_the_runner_as_it_was(llama: Path) -> None:
    runner = load_runner(llama)
    prompt = random_prompt(20, 131)
    before = serve_all(runner, [prompt], GREEDY)[0].token_ids
    speed = runner.measure()
    assert speed.prefill_tokens_per_s > 0
    assert speed.decode_step_s > 0
    assert serve_all(runner, [prompt], GREEDY)[0].token_ids == before


def test_a_step_without_rows_only_moves_blocks(llama: Path) -> None:
    runner = load_runner(llama)
    output = HandWritten(runner).output({})
    assert runner.execute(output).token_ids.tolist() == []
