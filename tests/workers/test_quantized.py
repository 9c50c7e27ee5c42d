"""Weight-only quantised checkpoints are served as the float values they stand for."""

import json
from pathlib import Path

import gguf
import pytest
import torch
from factories import LlamaShape, make_llama
from model_driver import all_logits, load_runner, random_prompt
from model_families import make_checkpoint
from quantized_factories import quantize_checkpoint, write_gguf
from safetensors.torch import load_file, save_file

from pagefleet.kernels import cpu_library
from pagefleet.kernels.select import ENVIRONMENT_VARIABLE
from pagefleet.workers.loader import CheckpointError
from pagefleet.workers.models.config import ModelError, UnsupportedModel

SHAPE = LlamaShape(intermediate_size=128, num_kv_heads=2)
PROMPT = random_prompt(40, SHAPE.vocab_size)
needs_compiled = pytest.mark.skipif(
    not cpu_library.is_available(), reason="the compiled kernels were not built"
)


# Experts on every layer, in blocks that Q8_0 has.
NO_SURPRISES: dict[str, dict[str, object]] = {
    "mixtral": {"intermediate_size": 64},
    "qwen3-moe": {"mlp_only_layers": [], "moe_intermediate_size": 64},
}


def logits(folder: Path, quantized_weights: str = "dequantized") -> torch.Tensor:
    return all_logits(load_runner(folder, quantized_weights=quantized_weights), [PROMPT], 40)[0]


WAYS = pytest.mark.parametrize(
    ("method", "how"),
    [
        ("awq", {}),
        ("awq", {"group_size": 64}),
        ("gptq", {}),
        ("gptq", {"bits": 8}),
        ("gptq", {"shuffle_groups": True}),
        ("gptq", {"zero_offset": 0}),
    ],
    ids=str,
)


@WAYS
def test_packed_weights_are_what_they_stand_for(
    tmp_path: Path, method: str, how: dict[str, int]
) -> None:
    folder = make_llama(tmp_path / "packed", SHAPE)
    quantize_checkpoint(folder, tmp_path / "plain", method, **how)
    assert torch.equal(logits(folder), logits(tmp_path / "plain"))


@pytest.mark.parametrize("family", ["phi3", "mixtral"])
def test_packed_weights_of_other_families(tmp_path: Path, family: str) -> None:
    """Fused projections, and experts."""
    folder = make_checkpoint(tmp_path / "packed", family)
    quantize_checkpoint(folder, tmp_path / "plain", "gptq", group_size=16)
    expected = logits(tmp_path / "plain")
    assert torch.equal(logits(folder), expected)
    torch.testing.assert_close(logits(folder, "auto"), expected, rtol=1e-4, atol=1e-4)


@needs_compiled
@WAYS
def test_weights_that_stay_packed_say_the_same(
    tmp_path: Path, method: str, how: dict[str, int]
) -> None:
    folder = make_llama(tmp_path / "packed", SHAPE)
    quantize_checkpoint(folder, tmp_path / "plain", method, **how)
    torch.testing.assert_close(
        logits(folder, "packed"), logits(tmp_path / "plain"), rtol=1e-4, atol=1e-4
    )


@needs_compiled
def test_weights_that_stay_packed_are_counted_as_they_are(tmp_path: Path) -> None:
    shape = LlamaShape(hidden_size=256, intermediate_size=512, num_kv_heads=2, vocab_size=64)
    folder = make_llama(tmp_path / "packed", shape)
    quantize_checkpoint(folder, tmp_path / "plain", "gptq", group_size=128)
    plain, packed = (load_runner(path).partition.weights for path in (tmp_path / "plain", folder))
    assert packed < plain * 0.25
    dequantized = load_runner(folder, quantized_weights="dequantized")
    assert dequantized.partition.weights == plain


@needs_compiled
def test_groups_of_unequal_order_are_made_float_even_if_packed_is_asked_for(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "packed", SHAPE)
    quantize_checkpoint(folder, tmp_path / "plain", "gptq", shuffle_groups=True)
    assert torch.equal(logits(folder, "packed"), logits(tmp_path / "plain"))


def test_packed_weights_need_kernels_that_take_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_llama(tmp_path / "packed", SHAPE)
    quantize_checkpoint(folder, tmp_path / "plain", "awq")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "reference")
    with pytest.raises(ModelError, match="'reference' take float weights alone"):
        load_runner(folder, quantized_weights="packed")
    assert torch.equal(logits(folder, "auto"), logits(tmp_path / "plain"))


def test_a_bias_of_zeros_beside_packed_weights_is_no_bias(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "packed", SHAPE)
    quantize_checkpoint(folder, tmp_path / "plain", "gptq")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.bias"
    save_file(tensors | {name: torch.zeros(64)}, folder / "model.safetensors")
    assert torch.equal(logits(folder), logits(tmp_path / "plain"))
    save_file(tensors | {name: torch.ones(64)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=rf"without a use: {name}"):
        load_runner(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
        ({"quant_method": "compressed-tensors"}, "'compressed-tensors'"),
        ({"bits": 3}, "3 bits are not supported for awq"),
        ({"dynamic": {"layers.0": {"bits": 8}}}, "dynamic is not supported"),
        ({"version": "gemv"}, "version 'gemv' of awq"),
        ({"group_size": 16}, r"qzeros has shape \[2, 8\].* asks for \[4, 8\]"),
    ],
    ids=str,
)
def test_other_ways_to_pack_are_refused_by_name(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = make_llama(tmp_path / "packed", SHAPE)
    quantize_checkpoint(folder, tmp_path / "plain", "awq")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        load_runner(folder)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "granite"])
def test_a_gguf_file_is_what_it_stands_for(tmp_path: Path, family: str, kind: str) -> None:
    folder = make_family(tmp_path / "plain", family)
    stored = write_gguf(folder, tmp_path / "gguf", family, getattr(gguf.GGMLQuantizationType, kind))
    save_file(stored, folder / "model.safetensors")
    assert torch.equal(logits(tmp_path / "gguf"), logits(folder))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize(("family", "name"), [("mixtral", "llama"), ("qwen3-moe", "qwen3moe")])
def test_a_gguf_file_with_experts_is_what_it_stands_for(
    tmp_path: Path, family: str, name: str, kind: str
) -> None:
    folder = make_family(tmp_path / "plain", family)
    stored = write_gguf(folder, tmp_path / "gguf", name, getattr(gguf.GGMLQuantizationType, kind))
    save_file(stored, folder / "model.safetensors")
    assert torch.equal(logits(tmp_path / "gguf"), logits(folder))


def make_family(folder: Path, family: str) -> Path:
    """Without what a GGUF file does not tell of."""
    if family == "llama":
        return make_llama(folder, SHAPE)
    make_checkpoint(folder, family, **NO_SURPRISES.get(family, {}))
    config = json.loads((folder / "config.json").read_text())
    changes = {"sliding_window": None, "use_sliding_window": False, "attention_bias": False}
    (folder / "config.json").write_text(json.dumps(config | changes))
    if family in ("qwen3", "granite"):
        tensors = load_file(folder / "model.safetensors")
        kept = {name: value for name, value in tensors.items() if not name.endswith("bias")}
        save_file(kept, folder / "model.safetensors")
    return folder


def test_stretched_frequencies_come_from_the_gguf_file(tmp_path: Path) -> None:
    scaling: dict[str, object] = {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 8.0],
        "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 8.0],
        "attention_factor": 1.0,
    }
    folder = make_llama(tmp_path / "plain", SHAPE, rope_scaling=scaling)
    factors = torch.tensor(scaling["short_factor"])
    write_gguf(folder, tmp_path / "gguf", "llama", gguf.GGMLQuantizationType.F32, factors)
    assert torch.equal(logits(tmp_path / "gguf"), logits(folder))


def test_what_a_gguf_file_has_beyond_is_refused(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "plain", SHAPE)
    write_gguf(folder, tmp_path / "smollm3", "smollm3", gguf.GGMLQuantizationType.F32)
    with pytest.raises(UnsupportedModel, match="GGUF architecture 'smollm3' is not supported"):
        load_runner(tmp_path / "smollm3")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.bias"
    save_file(tensors | {name: torch.ones(64)}, folder / "model.safetensors")
    write_gguf(folder, tmp_path / "biased", "llama", gguf.GGMLQuantizationType.F32)
    with pytest.raises(UnsupportedModel, match=r"without a use: blk.0.attn_q.bias"):
        load_runner(tmp_path / "biased")


def test_damaged_gguf_files_are_named(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "plain", SHAPE)
    write_gguf(folder, tmp_path / "gguf", "llama", gguf.GGMLQuantizationType.F32)
    path = tmp_path / "gguf" / "model.gguf"
    whole = path.read_bytes()
    for content in (whole[:-4000], whole[:60], b"", b"GGUF", b"\x00" * 64):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.gguf"):
            load_runner(tmp_path / "gguf")
    (tmp_path / "gguf" / "other.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="several GGUF files"):
        load_runner(tmp_path / "gguf")
