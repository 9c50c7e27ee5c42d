"""Under which name, and in which rows, a checkpoint stores what the decoder asks for.

The decoder asks by Llama's names, and for experts by Qwen's; `TensorNames` says what differs.
"""

import re
from dataclasses import dataclass

from .config import DecoderConfig

_EXPERT = re.compile(r"(model\.layers\.\d+)\.mlp\.(gate|experts\.\d+)\.(?:(\w+)\.)?(\w+)")


@dataclass(frozen=True, slots=True)
class StoredPlace:
    """A whole tensor, or rows [begin, ...) of one that has `num_rows`.

    num_rows: None = the whole tensor.
    """

    name: str
    begin: int = 0
    num_rows: int | None = None


def stored_place(config: DecoderConfig, name: str) -> StoredPlace:
    """config: of the whole model, not of one rank's part."""
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        return StoredPlace(_expert_name(config, *expert.groups()))
    if not config.names.fused:
        return StoredPlace(name)
    q_size, kv_size, ffn = config.q_size, config.kv_size, config.intermediate_size
    num_rows = {"qkv_proj": q_size + 2 * kv_size, "gate_up_proj": 2 * ffn}
    firsts = {
        "q_proj": ("qkv_proj", 0),
        "k_proj": ("qkv_proj", q_size),
        "v_proj": ("qkv_proj", q_size + kv_size),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", ffn),
    }
    prefix, _, kind = name.rpartition(".")
    prefix, _, linear = prefix.rpartition(".")
    if linear not in firsts:
        return StoredPlace(name)
    fused, begin = firsts[linear]
    return StoredPlace(f"{prefix}.{fused}.{kind}", begin, num_rows[fused])


def _expert_name(
    config: DecoderConfig, layer: str, module: str, linear: str | None, kind: str
) -> str:
    names = config.names
    if linear is None:
        return f"{layer}.{names.experts}.{module}.{kind}"
    index = ("gate_proj", "up_proj", "down_proj").index(linear)
    return f"{layer}.{names.experts}.{module}.{names.expert_linears[index]}.{kind}"
