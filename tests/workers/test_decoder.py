"""The decoder's logits against transformers', over scattered blocks full of NaN."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from factories import LlamaShape, convert_stories260k, find_stories260k, make_llama
from model_driver import all_logits, load_runner, random_prompt
from transformers import AutoModelForCausalLM

from pagefleet.cluster import default_model
from pagefleet.cluster.tokenizer import Tokenizer

LLAMA3_ROPE: dict[str, object] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES = {
    "plain": LlamaShape(num_kv_heads=4),
    "tied-gqa2": LlamaShape(tied=True),
    "gqa4-head8": LlamaShape(num_heads=8, num_kv_heads=2, head_dim=8),
    "gqa8-head128": LlamaShape(num_heads=8, num_kv_heads=1, head_dim=128),
    "uneven-9-3": LlamaShape(num_heads=9, num_kv_heads=3, head_dim=64, hidden_size=72, tied=True),
    "biases": LlamaShape(attention_bias=True, mlp_bias=True, vocab_size=257),
    "llama3-rope": LlamaShape(rope_scaling=LLAMA3_ROPE, rope_theta=500_000.0, head_dim=32),
    "linear-rope": LlamaShape(rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "old-rope-key": LlamaShape(rope_scaling={"type": "linear", "factor": 2.0}),
}

TEXTS = (
    "What is the capital of France?",
    "Water boils at a lower temperature on a mountain, because the air presses less on it.",
    "def mean(values):\n    return sum(values) / len(values)\n\n" * 4,
)


@torch.inference_mode()
def transformers_logits(folder: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_transformers(name: str, tmp_path: Path, kernels: str) -> None:
    folder = make_llama(tmp_path / "model", SHAPES[name])
    vocab_size = SHAPES[name].vocab_size
    prompts = [random_prompt(length, vocab_size, length) for length in (1, 16, 90)]
    expected = transformers_logits(folder, prompts)
    runner = load_runner(folder)
    for chunk in (7, 90):
        for found, wanted in zip(all_logits(runner, prompts, chunk), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-4)


def shape_matrix() -> Iterator[ParameterSet]:
    """KV heads, head size and tying in every combination; five that cover each value are not
    exhaustive."""
    diagonal = {(1, 8, False), (8, 32, True), (4, 64, False), (2, 80, True), (1, 128, False)}
    for case in itertools.product((1, 2, 4, 8), (8, 32, 64, 80, 128), (False, True)):
        yield pytest.param(*case, marks=() if case in diagonal else pytest.mark.exhaustive)


@pytest.mark.slow
@pytest.mark.parametrize(("num_kv_heads", "head_dim", "tied"), list(shape_matrix()))
def test_logits_equal_transformers_for_any_shape(
    num_kv_heads: int, head_dim: int, tied: bool, tmp_path: Path, kernels: str
) -> None:
    shape = LlamaShape(
        num_heads=8, num_kv_heads=num_kv_heads, head_dim=head_dim, tied=tied, num_layers=3
    )
    # Weights of this size keep rounding errors of float32 themselves below the tolerance.
    folder = make_llama(tmp_path / "model", shape, intermediate_size=172, hidden_size=96, scale=1.0)
    prompts = [random_prompt(length, shape.vocab_size, length) for length in (2, 33, 250)]
    expected = transformers_logits(folder, prompts)
    for block_size in (1, 16, 32):
        runner = load_runner(folder, block_size=block_size, num_blocks=300)
        for chunk in (1, 7, 16, 64, 250):
            for found, wanted in zip(all_logits(runner, prompts, chunk), expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-4)


def test_logits_of_a_trained_model_equal_transformers(tmp_path: Path, kernels: str) -> None:
    source = find_stories260k()
    if source is None:
        pytest.skip("stories260K is not on this machine")
    folder = convert_stories260k(source, tmp_path / "stories")
    prompts = [[1, *random_prompt(length, 512, length)] for length in (3, 200)]
    expected = transformers_logits(folder, prompts)
    for found, wanted in zip(all_logits(load_runner(folder), prompts, 64), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-4)


@pytest.mark.slow
def test_logits_of_the_default_model_equal_transformers(kernels: str) -> None:
    if not default_model.is_cached():
        pytest.skip("the default model was not fetched")
    folder = default_model.folder()
    # What people ask: random ids drive a trained model to logits where float32 itself is coarser.
    tokenizer = Tokenizer.load(folder)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    expected = transformers_logits(folder, prompts)
    for chunk in (7, 64):
        for found, wanted in zip(
            all_logits(load_runner(folder), prompts, chunk), expected, strict=True
        ):
            torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-4)


def test_bfloat16_is_near_float32(tmp_path: Path, kernels: str) -> None:
    folder = make_llama(tmp_path / "model", scale=1.0)
    prompts = [random_prompt(40, 131)]
    wide = all_logits(load_runner(folder), prompts, 40)[0]
    narrow = all_logits(load_runner(folder, dtype="bfloat16"), prompts, 40)[0]
    assert narrow.dtype == torch.float32
    assert (wide - narrow).abs().max() < 0.05 * wide.abs().max()


def test_deterministic_logits_depend_on_neither_batch_nor_chunk(
    tmp_path: Path, kernels: str
) -> None:
    folder = make_llama(tmp_path / "model", num_heads=8, num_kv_heads=2, head_dim=32)
    runner = load_runner(folder, deterministic=True, num_threads=2, num_blocks=128)
    prompts = [random_prompt(length, 131, length) for length in (5, 64, 300, 33)]
    expected = all_logits(runner, prompts, 300)
    for chunk in (1, 7, 16, 64):
        together = all_logits(runner, prompts, chunk, seed=chunk)
        for found, wanted in zip(together, expected, strict=True):
            assert torch.equal(found, wanted), f"chunks of {chunk} change logits"
    for prompt, wanted in zip(prompts, expected, strict=True):
        assert torch.equal(all_logits(runner, [prompt], 50)[0], wanted)
