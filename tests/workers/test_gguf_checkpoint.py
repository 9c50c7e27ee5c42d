"""A GGUF file's tensors under their Hugging Face names; served models are in test_quantized.py."""

from collections.abc import Callable
from pathlib import Path

import gguf
import torch
from factories import LlamaShape, make_llama
from quantized_factories import write_gguf
from torch import Tensor

from pagefleet.workers.gguf_checkpoint import GgufCheckpoint, _halves_from_pairs


def rotate_pairs(x: Tensor, angles: Tensor) -> Tensor:
    """x [heads, d]: (x0, x1), (x2, x3), … are rotated, each by its own angle."""
    even, odd = x[:, 0::2], x[:, 1::2]
    turned = torch.empty_like(x)
    turned[:, 0::2] = even * angles.cos() - odd * angles.sin()
    turned[:, 1::2] = even * angles.sin() + odd * angles.cos()
    return turned


def rotate_halves(x: Tensor, angles: Tensor) -> Tensor:
    """x [heads, d]: x[i] and x[i + d/2] are rotated together."""
    first, second = x.chunk(2, dim=1)
    return torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            first * angles.sin() + second * angles.cos(),
        ],
        dim=1,
    )


def test_attention_scores_are_the_same_in_both_rotary_layouts() -> None:
    generator = torch.Generator().manual_seed(0)
    heads, head_dim, hidden = 3, 8, 24
    q, k = torch.randn((2, heads * head_dim, hidden), generator=generator)
    x, y = torch.randn((2, hidden), generator=generator)
    angles = torch.linspace(0.1, 1.0, head_dim // 2)

    def scores(q: Tensor, k: Tensor, rotate: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        queries = rotate((q @ x).reshape(heads, head_dim), 5 * angles)
        keys = rotate((k @ y).reshape(heads, head_dim), 2 * angles)
        return (queries * keys).sum(dim=1)

    in_pairs = scores(q, k, rotate_pairs)
    in_halves = scores(_halves_from_pairs(q, heads), _halves_from_pairs(k, heads), rotate_halves)
    torch.testing.assert_close(in_pairs, in_halves, rtol=1e-4, atol=1e-4)


def test_all_tensors_come_under_the_names_of_a_checkpoint(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "plain", LlamaShape(num_kv_heads=2))
    kind = gguf.GGMLQuantizationType.F32
    stored = write_gguf(folder, tmp_path / "gguf", "llama", kind)
    checkpoint = GgufCheckpoint(tmp_path / "gguf" / "model.gguf")
    found = dict(checkpoint.tensors())
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())
    assert checkpoint.progress == (len(stored), len(stored))
    assert checkpoint.fields["general.architecture"] == "llama"
