"""A cache of fp8 (e4m3): what it may cost in accuracy, and what it never does."""

import pytest
import torch
from attention_factories import Heads, PagedStep, make_cos_sin, make_step

from pagefleet.kernels import cpu_library
from pagefleet.kernels.backend import KernelBackend
from pagefleet.kernels.cpu import CpuBackend
from pagefleet.kernels.reference import ReferenceBackend, stored

FP8 = torch.float8_e4m3fn
# 3 bits of mantissa: a number is stored with an error of at most 1/16 of itself, down to 2^-6.
ELEMENT_ERROR = 1 / 16
# Of attention's output, as a whole: the errors of many keys and values are independent.
OUTPUT_ERROR = 0.05
MIXED = ([1, 33, 300, 19, 16, 700], [1, 1, 1, 17, 16, 40])


@pytest.fixture(params=["reference", "deterministic", "cpu"])
def backend(request: pytest.FixtureRequest) -> KernelBackend:
    if request.param == "cpu":
        if not cpu_library.is_available():
            pytest.skip("the compiled kernels were not built")
        return CpuBackend()
    return ReferenceBackend(request.param == "deterministic")


def test_what_is_stored_is_within_a_sixteenth_and_never_infinite() -> None:
    x = torch.randn(10_000) * 10.0
    error = (stored(x, FP8).float() - x).abs()
    assert (error <= (ELEMENT_ERROR * x.abs()).clamp(min=2.0**-10)).all()
    far = torch.tensor([1e6, -1e6, 448.0, 464.0])
    assert stored(far, FP8).float().tolist() == [448.0, -448.0, 448.0, 448.0]


@pytest.mark.parametrize("window", [None, 50])
def test_attention_over_it_keeps_its_error_bound(
    backend: KernelBackend, window: int | None
) -> None:
    """Keys and values as models have them, of size about one."""
    exact = make_step(Heads(8, 2, 64), 16, *MIXED)
    narrow = PagedStep(exact.metadata, stored(exact.pool, FP8), exact.q, exact.k, exact.v)
    expected, found = (
        backend.attention(step.q, step.layer, step.metadata, 64**-0.5, window)
        for step in (exact, narrow)
    )
    error = float((found - expected).norm() / expected.norm())
    assert 0 < error < OUTPUT_ERROR


def test_only_the_slots_of_the_step_are_written(backend: KernelBackend) -> None:
    step = make_step(Heads(8, 2, 64), 16, *MIXED, kv_dtype=FP8)
    before = step.pool.view(torch.uint8).clone()
    cos_sin = make_cos_sin(1024, 0)
    backend.rope_and_cache(step.q, step.k, step.v, cos_sin, step.layer, step.metadata)
    blocks, offsets = step.metadata.slots // 16, step.metadata.slots % 16
    assert torch.equal(step.layer[blocks, 0, offsets].float(), stored(step.k, FP8).float())
    assert torch.equal(step.layer[blocks, 1, offsets].float(), stored(step.v, FP8).float())
    after = step.pool.view(torch.uint8).clone()
    after[blocks, 1, :, offsets] = before[blocks, 1, :, offsets]
    assert torch.equal(after, before)
