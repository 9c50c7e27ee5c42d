"""Linears kept narrower than the model computes: what is lost, and what is saved."""

import shutil
from pathlib import Path

import pytest
import torch
from factories import LlamaShape, make_llama
from model_driver import GREEDY, all_logits, load_runner, make_request, random_prompt, serve
from safetensors.torch import load_file, save_file

from pagefleet.kernels import cpu_library
from pagefleet.kernels.select import ENVIRONMENT_VARIABLE
from pagefleet.workers.models.config import ModelError

pytestmark = pytest.mark.skipif(
    not cpu_library.is_available(), reason="the compiled kernels were not built"
)
SHAPE = LlamaShape(hidden_size=256, intermediate_size=512, num_kv_heads=2, vocab_size=300)
# Of the root mean square of all logits; random weights of this spread make attention sharp.
BOUNDS = {"bfloat16": 0.02, "int8": 0.1}


def write_rounded(folder: Path, twin: Path, weight_dtype: str, tied: bool) -> None:
    """The same model as the float32 values that narrow weights stand for."""
    twin.mkdir()
    (twin / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for name, weight in tensors.items():
        is_table = name.startswith("model.embed_tokens") and not tied
        if weight.dim() < 2:
            continue
        if weight_dtype == "bfloat16" or is_table:
            tensors[name] = weight.bfloat16().float()
        else:
            step = weight.abs().amax(1, keepdim=True) / 127
            tensors[name] = (weight / step).round() * step
    save_file(tensors, twin / "model.safetensors")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("weight_dtype", BOUNDS)
def test_nothing_is_lost_but_the_rounding_of_the_weights(
    tmp_path: Path, weight_dtype: str, tied: bool
) -> None:
    folder = make_llama(tmp_path / "model", SHAPE, tied=tied)
    write_rounded(folder, tmp_path / "rounded", weight_dtype, tied)
    prompt = random_prompt(40, SHAPE.vocab_size)
    exact, rounded, narrow = (
        all_logits(load_runner(path, weight_dtype=name), [prompt], 40)[0]
        for path, name in ((folder, "auto"), (tmp_path / "rounded", "auto"), (folder, weight_dtype))
    )
    # A weight half way between two steps may go either way.
    torch.testing.assert_close(narrow, rounded, rtol=1e-3, atol=2e-3)
    error = (narrow - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0 < error < BOUNDS[weight_dtype]


@pytest.mark.parametrize(("weight_dtype", "share"), [("bfloat16", 0.5), ("int8", 0.25)])
def test_weights_are_counted_as_they_are_kept(
    tmp_path: Path, weight_dtype: str, share: float
) -> None:
    folder = make_llama(tmp_path / "model", SHAPE)
    whole = load_runner(folder).partition.weights
    narrow = load_runner(folder, weight_dtype=weight_dtype).partition.weights
    assert share * whole <= narrow <= (share + 0.1) * whole


@pytest.mark.parametrize("tied", [True, False])
def test_a_published_checkpoint_takes_half_the_memory_and_loses_nothing(
    tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_llama(tmp_path / "model", SHAPE, tied=tied)
    published, wide = tmp_path / "published", tmp_path / "wide"
    tensors = load_file(made / "model.safetensors")
    for folder, dtype in ((published, torch.bfloat16), (wide, torch.float32)):
        shutil.copytree(made, folder)
        tensors = {name: weight.bfloat16().to(dtype) for name, weight in tensors.items()}
        save_file(tensors, folder / "model.safetensors")
    prompt = random_prompt(40, SHAPE.vocab_size)
    runner = load_runner(published)
    assert runner.partition.weights <= 0.6 * load_runner(made).partition.weights
    logits = all_logits(runner, [prompt], 40)[0]
    assert torch.equal(logits, all_logits(load_runner(wide), [prompt], 40)[0])
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "reference")
    expected = all_logits(load_runner(published), [prompt], 40)[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_narrow_weight_changes_no_answer_with_the_batch(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "model", SHAPE)
    runner = load_runner(folder, weight_dtype="int8")
    requests = [
        make_request(str(n), random_prompt(10 + n, SHAPE.vocab_size, n), GREEDY) for n in range(4)
    ]
    together = serve(runner, requests)
    for request in requests:
        alone = serve(runner, [request])
        assert alone[request.request_key, 0].token_ids == together[request.request_key, 0].token_ids


def test_only_the_compiled_kernels_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_llama(tmp_path / "model", SHAPE)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "reference")
    with pytest.raises(ModelError, match="only the compiled CPU kernels"):
        load_runner(folder, weight_dtype="int8")
