"""The rotary layout and the refusals of the GGUF converter."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from pagefleet.cluster.config import CommandError
from pagefleet.cluster.gguf_checkpoint import _checkpoint_name, _halves_from_pairs, convert


def rotate_pairs(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """x [heads, d]: (x0, x1), (x2, x3), … are rotated, each by its own angle."""
    even, odd = x[:, 0::2], x[:, 1::2]
    turned = np.empty_like(x)
    turned[:, 0::2] = even * np.cos(angles) - odd * np.sin(angles)
    turned[:, 1::2] = even * np.sin(angles) + odd * np.cos(angles)
    return turned


def rotate_halves(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """x [heads, d]: x[i] and x[i + d/2] are rotated together."""
    first, second = np.split(x, 2, axis=1)
    return np.concatenate(
        [
            first * np.cos(angles) - second * np.sin(angles),
            first * np.sin(angles) + second * np.cos(angles),
        ],
        axis=1,
    )


def test_attention_scores_are_the_same_in_both_rotary_layouts():
    generator = np.random.default_rng(0)
    heads, head_dim, hidden = 3, 8, 24
    q, k = generator.standard_normal((2, heads * head_dim, hidden)).astype(np.float32)
    x, y = generator.standard_normal((2, hidden)).astype(np.float32)
    angles = np.linspace(0.1, 1.0, head_dim // 2)

    def scores(q_weight: np.ndarray, k_weight: np.ndarray, rotate) -> np.ndarray:
        queries = rotate((q_weight @ x).reshape(heads, head_dim), 5 * angles)
        keys = rotate((k_weight @ y).reshape(heads, head_dim), 2 * angles)
        return (queries * keys).sum(axis=1)

    in_pairs = scores(q, k, rotate_pairs)
    in_halves = scores(_halves_from_pairs(q, heads), _halves_from_pairs(k, heads), rotate_halves)
    np.testing.assert_allclose(in_pairs, in_halves, rtol=1e-5)


def test_names_follow_the_checkpoint():
    assert _checkpoint_name("token_embd.weight") == "model.embed_tokens.weight"
    assert _checkpoint_name("blk.11.ffn_down.weight") == "model.layers.11.mlp.down_proj.weight"
    with pytest.raises(CommandError, match="attn_rot"):
        _checkpoint_name("blk.0.attn_rot.weight")


def test_another_architecture_is_refused(tmp_path: Path):
    gguf_file = tmp_path / "other.gguf"
    writer = GGUFWriter(gguf_file, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CommandError, match="mamba"):
        convert(gguf_file, tmp_path, lambda done, total: None)
