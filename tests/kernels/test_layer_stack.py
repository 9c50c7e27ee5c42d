"""Layers run in one call against the same kernels called one by one."""

from dataclasses import replace

import pytest
import torch
from attention_factories import Heads, make_cos_sin, make_step
from kernel_twins import DTYPES
from torch import Tensor

from pagefleet.kernels.backend import PlainLayer, StackShape
from pagefleet.kernels.cpu import CpuBackend
from pagefleet.kernels.metadata import AttentionMetadata

HEADS = Heads(6, 2, 20)
HIDDEN, FFN = 70, 90
SHAPE = StackShape(num_heads=6, eps=1e-5, scale=0.2, soft_cap=None, is_gelu=False)


def make_layer(backend: CpuBackend, dtype: torch.dtype, has_qk_norm: bool) -> PlainLayer:
    def weight(out_features: int, in_features: int) -> Tensor:
        return (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)

    q_size, kv_size = (heads * HEADS.head_dim for heads in (HEADS.num_heads, HEADS.num_kv_heads))
    return PlainLayer(
        input_norm=torch.rand(HIDDEN).to(dtype),
        qkv=backend.pack_linear(weight(q_size + 2 * kv_size, HIDDEN), torch.randn(200).to(dtype)),
        q_norm=torch.rand(HEADS.head_dim).to(dtype) if has_qk_norm else None,
        k_norm=torch.rand(kv_size).to(dtype) if has_qk_norm else None,
        output=backend.pack_linear(weight(HIDDEN, q_size)),
        mlp_norm=torch.rand(HIDDEN).to(dtype),
        gate_up=backend.pack_linear(weight(2 * FFN, HIDDEN)),
        down=backend.pack_linear(weight(HIDDEN, FFN)),
        cos_sin=make_cos_sin(512, 20),
        window=9 if has_qk_norm else None,
    )


def normalise(backend: CpuBackend, heads: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    if norm is None:
        return heads
    return backend.rms_norm(heads.reshape(-1, len(norm)), norm, eps).view(heads.shape)


def run_one_by_one(
    backend: CpuBackend,
    layers: list[PlainLayer],
    shape: StackShape,
    residual: Tensor,
    kv_layers: list[Tensor],
    metadata: AttentionMetadata,
) -> Tensor:
    x = None
    for layer, kv_layer in zip(layers, kv_layers, strict=False):
        if x is None:
            x = backend.rms_norm(residual, layer.input_norm, shape.eps)
        else:
            x = backend.add_rms_norm(x, residual, layer.input_norm, shape.eps)
        fused = backend.linear(x, layer.qkv).view(len(residual), -1, HEADS.head_dim)
        q, k, v = fused.split([6, 2, 2], dim=1)
        q = normalise(backend, q, layer.q_norm, shape.eps)
        k = normalise(backend, k, layer.k_norm, shape.eps)
        q = backend.rope_and_cache(q, k, v, layer.cos_sin, kv_layer, metadata)
        attended = backend.attention(
            q, kv_layer, metadata, shape.scale, layer.window, shape.soft_cap
        )
        x = backend.linear(attended.flatten(1), layer.output)
        x = backend.add_rms_norm(x, residual, layer.mlp_norm, shape.eps)
        gate_up = backend.linear(x, layer.gate_up)
        activate = backend.gelu_tanh_and_mul if shape.is_gelu else backend.silu_and_mul
        x = backend.linear(activate(gate_up), layer.down)
    assert x is not None
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [None, torch.int8])
@pytest.mark.parametrize(
    ("query_lens", "num_threads"),
    [([1], 2), ([1, 1, 1, 5, 40], 2), ([1, 300, 7, 230], 2), ([1, 300, 7, 230], 4)],
    ids=["one", "mixed", "by blocks", "by larger blocks"],
)
@pytest.mark.parametrize(
    ("has_qk_norm", "shape"),
    [(False, SHAPE), (True, replace(SHAPE, is_gelu=True, soft_cap=8.0))],
    ids=["plain", "with norms, a window, a cap and GELU"],
)
def test_a_stack_is_bitwise_equal_to_its_kernels_one_by_one(
    backend: CpuBackend,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    query_lens: list[int],
    num_threads: int,
    has_qk_norm: bool,
    shape: StackShape,
) -> None:
    torch.manual_seed(21)
    backend = CpuBackend(num_threads=num_threads, weight_dtype=weight_dtype)
    layers = [make_layer(backend, dtype, has_qk_norm) for _ in range(3)]
    context_lens = [length + 11 * at for at, length in enumerate(query_lens)]
    step = make_step(HEADS, 7, context_lens, query_lens, dtype=dtype)
    pools = [torch.randn(step.pool.shape).to(dtype)] * 2
    pools[1] = pools[0].clone()
    caches = [[pool[:, layer] for layer in range(3)] for pool in pools]
    residuals = [torch.randn(sum(query_lens), HIDDEN).to(dtype)] * 2
    residuals[1] = residuals[0].clone()
    stack = backend.stack_layers(layers, shape)
    for num_layers in (3, 2):  # what a run leaves behind must not matter to the next
        out = backend.run_stack(stack, num_layers, residuals[0], caches[0], step.metadata)
        expected = run_one_by_one(
            backend, layers[:num_layers], shape, residuals[1], caches[1], step.metadata
        )
        assert out.isfinite().all()
        assert torch.equal(out, expected)
        assert torch.equal(residuals[0], residuals[1])
        assert torch.equal(pools[0], pools[1])


def test_a_stack_takes_more_rows_after_fewer_and_fewer_after_more(backend: CpuBackend) -> None:
    torch.manual_seed(22)
    layers = [make_layer(backend, torch.float32, False) for _ in range(2)]
    stack = backend.stack_layers(layers, SHAPE)
    residual = torch.randn(30, HIDDEN)
    for num_rows in (1, 30, 2):
        step = make_step(HEADS, 4, [1] * num_rows, [1] * num_rows)
        kv_layers = [step.pool[:, layer] for layer in range(2)]
        out = backend.run_stack(stack, 2, residual[:num_rows].clone(), kv_layers, step.metadata)
        expected = run_one_by_one(
            backend, layers, SHAPE, residual[:num_rows].clone(), kv_layers, step.metadata
        )
        assert torch.equal(out, expected)
