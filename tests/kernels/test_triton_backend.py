"""The Triton kernels against their plain-torch twins at odd sizes, in Triton's interpreter.

Where there is a GPU, `tests/gpu` runs them compiled, and this file is skipped: a process either
interprets kernels or compiles them.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_factories import Heads, PagedStep, make_cos_sin, make_step
from torch import Tensor

from pagefleet.kernels.backend import GraphBackend
from pagefleet.kernels.reference import ReferenceBackend

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed: see `make gpu-tools`", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("here the kernels are compiled: tests/gpu", allow_module_level=True)

from pagefleet.kernels.triton_backend import TritonBackend

REFERENCE = ReferenceBackend()
MIXED = ([1, 33, 130, 19, 16, 5], [1, 1, 1, 17, 16, 2])
DECODES = ([600, 2, 257], [1, 1, 1])
HEADS = [Heads(9, 3, 64), Heads(2, 1, 8), Heads(3, 3, 80), Heads(40, 2, 16)]


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def attend(backend: ReferenceBackend, step: PagedStep, window: int | None, cap: float | None):
    return backend.attention(step.q, step.layer, step.metadata, 0.2, window, cap)


@pytest.mark.parametrize(("block_size", "deterministic"), [(1, False), (16, True)])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_over_scattered_blocks_with_junk(
    heads: Heads, block_size: int, deterministic: bool
) -> None:
    step = make_step(heads, block_size, *MIXED)
    backend = TritonBackend(deterministic)
    assert_near(attend(backend, step, None, None), attend(REFERENCE, step, None, None))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (6, 2.0), (120, None), (None, 2.0)])
def test_attention_with_window_and_soft_cap(
    window: int | None, soft_cap: float | None, deterministic: bool
) -> None:
    step = make_step(Heads(4, 2, 16), 4, *MIXED)
    if window is not None:
        for row, (length, queries) in enumerate(zip(*MIXED, strict=True)):
            # Slots that no query sees any more may hold anything.
            unseen = torch.arange(max(0, length - queries - window + 1))
            blocks = step.metadata.block_tables[row, unseen // 4].long()
            step.layer[blocks, :, unseen % 4] = float("nan")
    backend = TritonBackend(deterministic)
    expected = attend(REFERENCE, step, window, soft_cap)
    assert_near(attend(backend, step, window, soft_cap), expected)


@pytest.mark.parametrize("window", [None, 300])
def test_decodes_over_split_keys(window: int | None) -> None:
    """Long contexts and few sequences: the keys are split, and one sequence has fewer than that."""
    step = make_step(Heads(4, 2, 32), 16, *DECODES)
    assert_near(attend(TritonBackend(), step, window, None), attend(REFERENCE, step, window, None))


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (30, 2.0)])
def test_deterministic_attention_does_not_depend_on_chunk_or_batch(
    window: int | None, soft_cap: float | None
) -> None:
    length, backend = 150, TritonBackend(deterministic=True)
    whole = make_step(Heads(4, 2, 16), 16, [length], [length])
    expected = attend(backend, whole, window, soft_cap)
    for begin, end in [(0, 1), (7, 100), (149, 150)]:
        chunk = make_step(Heads(4, 2, 16), 16, [20, end], [1, end - begin])
        part = PagedStep(
            chunk.metadata,
            torch.cat([chunk.pool, whole.pool]),
            torch.cat([chunk.q[:1], whole.q[begin:end]]),
            chunk.k,
            chunk.v,
        )
        table = whole.metadata.block_tables[0, : -(-end // 16)] + len(chunk.pool)
        part.metadata.block_tables[1, : len(table)] = table
        out = attend(backend, part, window, soft_cap)[1:]
        assert torch.equal(out, expected[begin:end]), f"positions {begin}..{end} differ"


@pytest.mark.parametrize("rotary_dim", [0, 6, 16])
@pytest.mark.parametrize("heads", [Heads(4, 2, 16), Heads(9, 3, 20)], ids=str)
def test_rope_and_cache_writes_only_its_slots(heads: Heads, rotary_dim: int) -> None:
    step = make_step(heads, 4, *MIXED)
    step.pool.nan_to_num_(nan=7.0)
    cos_sin = make_cos_sin(512, rotary_dim)
    pools = [step.pool.clone(), step.pool.clone()]
    fused = torch.cat([step.q, step.k, step.v], dim=1)
    q, k, v = fused.split([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)
    turned = [
        backend.rope_and_cache(q, k, v, cos_sin, pool[:, 1], step.metadata)
        for backend, pool in zip((TritonBackend(), REFERENCE), pools, strict=True)
    ]
    assert_near(turned[0], turned[1])
    assert_near(pools[0], pools[1])
    assert (pools[0] != step.pool).any(), "nothing was written"


def test_its_steps_can_be_recorded_and_the_references_cannot() -> None:
    """The reference asks the device for lengths, which no recording could answer anew."""
    assert isinstance(TritonBackend(), GraphBackend)
    assert not isinstance(REFERENCE, GraphBackend)


def test_an_fp8_cache_is_written_and_read_as_the_reference_does() -> None:
    step = make_step(Heads(4, 2, 16), 4, *MIXED, kv_dtype=torch.float8_e4m3fn)
    assert_near(attend(TritonBackend(), step, None, None), attend(REFERENCE, step, None, None))
    pools = [step.pool.clone(), step.pool.clone()]
    k, cos_sin = step.k * 300, make_cos_sin(512, 16)  # some past what the dtype has numbers for
    for backend, pool in zip((TritonBackend(), REFERENCE), pools, strict=True):
        backend.rope_and_cache(step.q, k, step.v, cos_sin, pool[:, 1], step.metadata)
    written, expected = (pool.float().nan_to_num(nan=9.0) for pool in pools)
    # The interpreter halves what rounds up to a power of two; hardware does not.
    assert ((written == expected) | (written == expected / 2)).float().mean() > 0.999
    assert (written == expected).float().mean() > 0.99


@pytest.mark.parametrize(("rows", "width"), [(1, 7), (5, 64), (3, 576), (70, 20)])
def test_norms(rows: int, width: int) -> None:
    x, residual, weight = torch.randn(rows, width), torch.randn(rows, width), torch.rand(width)
    assert_near(TritonBackend().rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    wide = torch.randn(rows, 2 * width)[:, :width]
    expected = REFERENCE.rms_norm(wide, weight, 1e-5)
    assert_near(TritonBackend().rms_norm(wide, weight, 1e-5), expected)
    sums = [residual.clone(), residual.clone()]
    normed = TritonBackend().add_rms_norm(x, sums[0], weight, 1e-5)
    assert_near(normed, REFERENCE.add_rms_norm(x, sums[1], weight, 1e-5))
    assert torch.equal(sums[0], sums[1])


@pytest.mark.parametrize(("rows", "width"), [(1, 3), (4, 1030)])
def test_activations(rows: int, width: int) -> None:
    gate_up = 3 * torch.randn(rows, 2 * width)
    assert_near(TritonBackend().silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up))
    assert_near(TritonBackend().gelu_tanh_and_mul(gate_up), REFERENCE.gelu_tanh_and_mul(gate_up))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_copy_on_write_of_many_blocks_in_one_launch(dtype: torch.dtype) -> None:
    pool = torch.randint(0, 200, (9, 3, 2, 4, 3, 5)).to(dtype)
    expected = pool.clone()
    copies = torch.tensor([[0, 4], [3, 1], [8, 2]]), torch.tensor([3, 0, 4])
    arguments = (copies[0][:, 0].contiguous(), copies[0][:, 1].contiguous(), copies[1])
    REFERENCE.copy_slots(expected, *arguments)
    TritonBackend().copy_slots(pool, *arguments)
    assert torch.equal(pool, expected)


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper() -> None:
    """What the interpreter lets pass, types that do not join and tiles that do not fit, the
    compiler does not."""
    script = Path(__file__).with_name("compile_triton.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    kernels = ["attend", "copy_slots", "gate_and_mul", "merge_splits", "rms_norm", "rope_and_cache"]
    assert ended.stdout.split() == kernels
