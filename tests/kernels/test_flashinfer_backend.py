"""What our backend asks of FlashInfer: against the plain-torch twin, and bound to the signatures of
the installed package."""

import importlib.util
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_factories import Heads, PagedStep, make_cos_sin, make_step
from flashinfer_twin import FlashInferTwin, installed
from torch import Tensor

from pagefleet.kernels.metadata import HostLayout
from pagefleet.kernels.reference import ReferenceBackend
from pagefleet.kernels.sampling import DrawParams, Limits, apply_filters, softmax_weights

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed: see `make gpu-tools`", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("here FlashInfer itself is tested: tests/gpu", allow_module_level=True)

from pagefleet.kernels.flashinfer_backend import FlashInferBackend

REFERENCE = ReferenceBackend()
CPU = torch.device("cpu")
MIXED = ([1, 33, 70, 19, 16, 5], [1, 1, 1, 17, 16, 2])
SHAPES = [(Heads(8, 2, 64), 4), (Heads(4, 4, 128), 16)]
WINDOWS = [(None, None), (6, None), (None, 2.0), (20, 3.0)]
FP8 = torch.float8_e4m3fn


@pytest.fixture
def twin() -> FlashInferTwin:
    return FlashInferTwin(installed())


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("window", "soft_cap"), WINDOWS)
@pytest.mark.parametrize(("heads", "block_size"), SHAPES, ids=str)
@pytest.mark.parametrize("keeps_host", [True, False])
def test_attention(
    twin: FlashInferTwin,
    heads: Heads,
    block_size: int,
    window: int | None,
    soft_cap: float | None,
    keeps_host: bool,
) -> None:
    step = make_step(heads, block_size, *MIXED, dtype=torch.bfloat16)
    if keeps_host:
        step = replace(step, metadata=replace(step.metadata, host=host_layout(step)))
    backend = FlashInferBackend(CPU, twin)
    arguments = (step.q, step.layer, step.metadata, 0.2, window, soft_cap)
    assert_near(backend.attention(*arguments), REFERENCE.attention(*arguments))


def test_layers_of_a_step_share_a_plan_and_the_next_step_is_planned_anew(
    twin: FlashInferTwin,
) -> None:
    heads, backend = Heads(8, 2, 64), FlashInferBackend(CPU, twin)
    for seed, lens in enumerate([MIXED, ([9, 40], [1, 1]), MIXED]):
        step = make_step(heads, 4, *lens, dtype=torch.bfloat16, seed=seed)
        for window in (None, 6, None, 6):
            arguments = (step.q, step.layer, step.metadata, 0.2, window)
            assert_near(backend.attention(*arguments), REFERENCE.attention(*arguments))
    decode, prefill = (f"Batch{kind}WithPagedKVCacheWrapper" for kind in ("Decode", "Prefill"))
    assert twin.calls[decode] == twin.calls[prefill] == 2, "one wrapper per shape"
    assert twin.calls[f"{decode}.plan"] == 3 * 2
    assert twin.calls[f"{prefill}.plan"] == 2 * 2, "the second step has no prompts"


def test_a_graphs_step_is_planned_into_the_same_buffers(twin: FlashInferTwin) -> None:
    """Its metadata is one object whose tensors change; the host's layout says to what."""
    heads, backend = Heads(8, 2, 64), FlashInferBackend(CPU, twin)
    steps = [
        make_step(heads, 4, lens, [1, 1], dtype=torch.bfloat16, seed=seed)
        for seed, lens in enumerate([[1, 1], [9, 40], [30, 2]])
    ]
    static = steps[0].metadata
    for step in steps:
        backend.plan_graph(static, host_layout(step), max_num_pages=32)
        for window in (None, 6):
            out = backend.attention(step.q, step.layer, static, 0.2, window)
            expected = REFERENCE.attention(step.q, step.layer, step.metadata, 0.2, window)
            assert_near(out, expected)
        eager = make_step(heads, 4, *MIXED, dtype=torch.bfloat16)
        arguments = (eager.q, eager.layer, eager.metadata, 0.2)
        assert_near(backend.attention(*arguments), REFERENCE.attention(*arguments))


@pytest.mark.parametrize("rotary_dim", [0, 32, 64])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
def test_rope_and_cache(twin: FlashInferTwin, rotary_dim: int, kv_dtype: torch.dtype) -> None:
    heads = Heads(8, 2, 64)
    step = make_step(heads, 4, *MIXED, dtype=torch.bfloat16)
    pools = [torch.zeros_like(step.pool).to(kv_dtype) for _ in range(2)]
    cos_sin = make_cos_sin(512, rotary_dim)
    turned = []
    for backend, pool in zip((FlashInferBackend(CPU, twin), REFERENCE), pools, strict=True):
        fused = torch.cat([step.q, step.k * 300, step.v], dim=1)
        q, k, v = fused.split([8, 2, 2], dim=1)
        turned.append(backend.rope_and_cache(q, k, v, cos_sin, pool[:, 1], step.metadata))
    assert_near(*turned)
    assert_near(*(pool.float() for pool in pools))
    assert ("apply_rope_with_cos_sin_cache_inplace" in twin.calls) == (rotary_dim > 0)


def test_norms_and_activations(twin: FlashInferTwin) -> None:
    backend = FlashInferBackend(CPU, twin)
    x, residual = torch.randn(2, 5, 64).bfloat16()
    weight = torch.rand(64).bfloat16()
    assert_near(backend.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    sums = [residual.clone(), residual.clone()]
    assert_near(
        backend.add_rms_norm(x.clone(), sums[0], weight, 1e-5),
        REFERENCE.add_rms_norm(x, sums[1], weight, 1e-5),
    )
    assert torch.equal(sums[0], sums[1])
    assert_near(backend.silu_and_mul(x), REFERENCE.silu_and_mul(x))
    assert_near(backend.gelu_tanh_and_mul(x), REFERENCE.gelu_tanh_and_mul(x))
    assert set(twin.calls) == {"rmsnorm", "fused_add_rmsnorm", "silu_and_mul", "gelu_tanh_and_mul"}


def test_what_flashinfer_has_no_kernel_for_is_tritons(twin: FlashInferTwin) -> None:
    backend = FlashInferBackend(CPU, twin)
    x, weight = torch.randn(3, 20), torch.rand(20)
    residual = torch.randn(3, 20)
    backend.rms_norm(x, weight, 1e-5)
    backend.add_rms_norm(x, residual, weight, 1e-5)
    backend.silu_and_mul(x)
    backend.gelu_tanh_and_mul(x)
    step = make_step(Heads(4, 2, 24), 4, [9, 7], [1, 2])
    backend.rope_and_cache(step.q, step.k, step.v, make_cos_sin(16, 24), step.layer, step.metadata)
    out = backend.attention(step.q, step.layer, step.metadata, 0.2)
    assert_near(out, REFERENCE.attention(step.q, step.layer, step.metadata, 0.2))
    assert twin.calls == {}


@pytest.mark.parametrize("limits", [Limits(), Limits(top_k=False), Limits(False, False, False)])
def test_filters_leave_what_ours_leave(twin: FlashInferTwin, limits: Limits) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = 3 * torch.randn(6, 200, generator=generator)
    off = torch.zeros(6, dtype=torch.int64)
    params = DrawParams(
        temperature=torch.tensor([0.5, 1.0, 2.0] * 2),
        top_k=torch.tensor([0, 5, 1, 300, 200, 40]) if limits.top_k else off,
        top_p=torch.tensor([1.0, 0.9, 0.5, 0.2, 0.99, 0.7]) if limits.top_p else off + 1.0,
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.1, 0.01, 0.5]) if limits.min_p else off.float(),
        uniforms=torch.zeros(6),
        limits=limits,
    )
    weights = FlashInferBackend(CPU, twin).filtered_weights(logits, params)
    expected = softmax_weights(logits, params.temperature)
    apply_filters(expected, params.top_k, params.top_p, params.min_p)
    expected /= expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights / weights.sum(-1, keepdim=True), expected)


def test_the_installed_package_is_bound_where_it_was_required() -> None:
    """In CI the tests above have to meet the real signatures."""
    if os.environ.get("PAGEFLEET_REQUIRE_FLASHINFER") != "1":
        pytest.skip("FlashInfer is optional here")
    assert installed() is not None


def host_layout(step: PagedStep) -> HostLayout:
    metadata = step.metadata
    tensors = (metadata.query_starts, metadata.context_lens, metadata.block_tables)
    return HostLayout(*(np.ascontiguousarray(tensor.numpy()) for tensor in tensors))
