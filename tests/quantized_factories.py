"""Checkpoints as AWQ, GPTQ and GGUF writers leave them, beside float twins with equal values."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor

# Which of 8 outputs stands in each nibble of a word of AWQ's.
AWQ_INTERLEAVING = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Small integers [rows, n * per word] → int32 [rows, n]."""
    per_word = 32 // bits
    words = torch.zeros(values.shape[0], values.shape[1] // per_word, dtype=torch.int64)
    for place, source in enumerate(order or range(per_word)):
        words |= values[:, source::per_word].long() << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def quantize_checkpoint(
    folder: Path,
    twin: Path,
    method: str,
    bits: int = 4,
    group_size: int = 32,
    shuffle_groups: bool = False,
    zero_offset: int = 1,
) -> None:
    """Rewrite the linears of `folder` in AWQ's or GPTQ's layout; `twin` gets their float values.

    shuffle_groups: an input's group is not told by its place (GPTQ's act order).
    """
    tensors = load_file(folder / "model.safetensors")
    plain, packed = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if not name.endswith(("proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")):
            continue
        module = name.removesuffix("weight")
        del packed[name]
        parts, plain[name] = _quantized(
            weight, method, bits, group_size, shuffle_groups, zero_offset
        )
        packed |= {f"{module}{part}": tensor for part, tensor in parts.items()}
    config = json.loads((folder / "config.json").read_text())
    section = {"quant_method": method, "bits": bits, "group_size": group_size}
    if method == "awq":
        section["version"] = "gemm"
    elif zero_offset == 0:
        section["checkpoint_format"] = "gptq_v2"
    twin.mkdir()
    (twin / "config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    save_file(plain, twin / "model.safetensors")
    save_file(packed, folder / "model.safetensors")


def _quantized(
    weight: Tensor, method: str, bits: int, group_size: int, shuffle: bool, zero_offset: int
) -> tuple[dict[str, Tensor], Tensor]:
    """The parts of one linear, and the weight [out, in] they stand for."""
    inputs = weight.T  # [in, out]
    groups = torch.arange(len(inputs)) // group_size
    if shuffle:
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(5))]
    most = 2**bits - 1
    scales, zeros = [], []
    for group in range(int(groups.max()) + 1):
        part = inputs[groups == group]
        low, high = part.amin(0).clamp(max=0), part.amax(0).clamp(min=1e-3)
        scale = ((high - low) / most).half()
        scales.append(scale)
        zeros.append((-low / scale.float()).round().clamp(1, most))
    scale, zero = torch.stack(scales), torch.stack(zeros)
    words = (inputs / scale.float()[groups] + zero[groups]).round().clamp(0, most)
    plain = ((words - zero[groups]) * scale.float()[groups]).T.contiguous()
    if method == "awq":
        parts = {
            "qweight": pack(words, bits, AWQ_INTERLEAVING),
            "qzeros": pack(zero, bits, AWQ_INTERLEAVING),
            "scales": scale,
        }
        return parts, plain
    return {
        "qweight": pack(words.T, bits).T.contiguous(),
        "qzeros": pack(zero - zero_offset, bits),
        "scales": scale,
        "g_idx": groups.to(torch.int32),
    }, plain


def write_gguf(
    folder: Path,
    target: Path,
    architecture: str,
    kind: gguf.GGMLQuantizationType,
    rope_factors: Tensor | None = None,
) -> dict[str, Tensor]:
    """A Hugging Face folder as a GGUF file; linears and embedding quantised as `kind`.

    → the tensors by their Hugging Face names, as the file's reader has to see them.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    target.mkdir()
    writer = gguf.GGUFWriter(target / "model.gguf", architecture)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    _add_features(writer, config)
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.numpy())
    names = gguf.get_tensor_name_map(
        next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        config["num_hidden_layers"],
    )
    seen: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        stored_kind = kind if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        values = tensor.numpy()
        is_turned = architecture in ("llama", "granite") and name.endswith(
            ("q_proj.weight", "k_proj.weight")
        )
        num_heads = heads if "q_proj" in name else kv_heads
        if is_turned:
            values = _pairs_from_halves(values, num_heads)
        data = quantize(values, stored_kind)
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)(\.\w+\.weight)", name)
        if expert is not None:
            stacks.setdefault(expert[1] + expert[3], {})[int(expert[2])] = data
        else:
            stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            writer.add_tensor(stored_name, data, raw_dtype=stored_kind)
        back = dequantize(data, stored_kind)
        if is_turned:
            back = _halves_from_pairs(back, num_heads)
        seen[name] = torch.from_numpy(np.ascontiguousarray(back))
    for name, parts in stacks.items():
        stacked = np.stack([parts[index] for index in range(len(parts))])
        stored_name = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(stored_name, stacked, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return seen


def _add_features(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Of families with experts, and of Granite's factors."""
    num_experts = config.get("num_local_experts", config.get("num_experts"))
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "attention_multiplier" in config:
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])


def _pairs_from_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def _halves_from_pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
