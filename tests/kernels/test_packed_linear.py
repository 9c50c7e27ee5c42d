"""Products over packed weights against torch's, at odd sizes, for every instruction set."""

import pytest
import torch
from kernel_twins import DTYPES, assert_near

from pagefleet.kernels.cpu import CpuBackend
from pagefleet.kernels.quantized_weight import QuantizedWeight


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 13, 16, 33, 300])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (33, 7), (96, 64), (190, 577)])
def test_linear_equals_its_twin(
    backend: CpuBackend,
    rows: int,
    out_features: int,
    in_features: int,
    weight_dtype: torch.dtype,
    x_dtype: torch.dtype,
) -> None:
    torch.manual_seed(9)
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(weight_dtype)
    bias = torch.randn(out_features).to(weight_dtype)
    x = torch.randn(rows, in_features).to(x_dtype)
    out = backend.linear(x, backend.pack_linear(weight, bias))
    expected = x.float() @ weight.float().T + bias.float()
    assert_near(out, expected.to(x_dtype))
    plain = backend.linear(x, backend.pack_linear(weight))
    assert_near(plain, (x.float() @ weight.float().T).to(x_dtype))


def test_linear_over_a_depth_of_several_blocks(backend: CpuBackend) -> None:
    torch.manual_seed(10)
    weight, x = torch.randn(40, 5001) / 70, torch.randn(90, 5001)
    for dtype in DTYPES:
        packed = backend.pack_linear(weight.to(dtype))
        expected = x.double() @ weight.to(dtype).double().T
        torch.testing.assert_close(
            backend.linear(x, packed), expected.float(), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 31, 32, 33, 48, 257, 530])
@pytest.mark.parametrize("in_features", [31, 32, 33, 1057])
def test_matrix_tiles_of_any_fill_equal_their_twin(
    backend: CpuBackend, rows: int, in_features: int
) -> None:
    torch.manual_seed(18)
    weight, x = torch.randn(65, in_features).bfloat16(), torch.randn(rows, in_features)
    packed = backend.pack_linear(weight)
    torch.testing.assert_close(
        backend.linear(x, packed), x @ weight.float().T, rtol=1e-4, atol=4e-4
    )
    half = x.bfloat16()
    expected = (half.float() @ weight.float().T).bfloat16()
    torch.testing.assert_close(backend.linear(half, packed), expected, rtol=2e-2, atol=2e-2)


# Float32 sums of 64 products may lose some of it, too.
@pytest.mark.parametrize(("weight_dtype", "bits"), [(torch.bfloat16, 17), (None, 20)])
def test_inputs_keep_as_many_bits_as_their_weights_deserve(
    backend: CpuBackend, weight_dtype: torch.dtype | None, bits: int
) -> None:
    torch.manual_seed(19)
    weight = torch.randn(96, 64).bfloat16()
    x = torch.randn(40, 64) * torch.logspace(-15, 15, 40)[:, None]
    backend = CpuBackend(num_threads=2, weight_dtype=weight_dtype)
    out = backend.linear(x, backend.pack_linear(weight)).double()
    exact = x.double() @ weight.double().T
    most = x.double().abs() @ weight.double().abs().T
    assert ((out - exact).abs() <= most * 2.0**-bits).all()


def test_a_float_weight_is_kept_at_half_its_width_where_that_loses_nothing(
    backend: CpuBackend,
) -> None:
    torch.manual_seed(21)
    weight, x = torch.randn(192, 700).bfloat16().float(), torch.randn(9, 700)
    packed = backend.pack_linear(weight)
    assert packed.num_bytes == 192 * 700 * 2
    ids = torch.arange(192)
    assert torch.equal(backend.embedding(ids, packed, torch.float32), weight)
    expected = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(backend.linear(x, packed), expected, rtol=1e-5, atol=1e-4)
    assert backend.pack_table(weight).dtype == torch.bfloat16
    weight[191, 699] += 2.0**-20
    assert backend.pack_linear(weight).num_bytes == 192 * 700 * 4
    assert backend.pack_table(weight) is weight


def test_a_row_that_is_not_finite_spoils_no_other(backend: CpuBackend) -> None:
    torch.manual_seed(20)
    weight, x = torch.randn(40, 70).bfloat16(), torch.randn(20, 70)
    packed = backend.pack_linear(weight)
    expected = backend.linear(x, packed)
    x[3, 5], x[18, 69] = float("inf"), float("nan")
    out = backend.linear(x, packed)
    others = torch.tensor([row not in (3, 18) for row in range(20)])
    assert torch.equal(out[others], expected[others])
    assert not out[3].isfinite().any() and out[18].isnan().all()


@pytest.mark.parametrize("rows", [1, 17])
def test_int8_weights_are_within_half_a_step(backend: CpuBackend, rows: int) -> None:
    torch.manual_seed(11)
    weight, x = torch.randn(70, 130), torch.randn(rows, 130)
    narrow = CpuBackend(num_threads=2, weight_dtype=torch.int8)
    packed = narrow.pack_linear(weight)
    step = weight.abs().amax(1) / 127
    stored = narrow.embedding(torch.arange(70), packed, torch.float32)
    assert ((stored - weight).abs() <= step[:, None] * 0.5001).all()
    torch.testing.assert_close(narrow.linear(x, packed), x @ stored.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_a_row_is_bitwise_the_same_among_any_others(
    backend: CpuBackend, weight_dtype: torch.dtype, x_dtype: torch.dtype
) -> None:
    torch.manual_seed(12)
    weight, x = torch.randn(700, 576), torch.randn(150, 576).to(x_dtype)
    narrow = CpuBackend(num_threads=2, weight_dtype=weight_dtype)
    packed = narrow.pack_linear(weight)
    expected = narrow.linear(x, packed)
    for rows in [[3], [0, 1], list(range(17)), [149, 5, 33], list(range(70, 140))]:
        assert torch.equal(narrow.linear(x[rows], packed), expected[rows]), rows


@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_embedding_returns_the_rows_that_were_packed(
    backend: CpuBackend, weight_dtype: torch.dtype
) -> None:
    torch.manual_seed(13)
    weight = torch.randn(101, 77).to(weight_dtype)
    packed = backend.pack_linear(weight)
    ids = torch.tensor([100, 0, 31, 32, 100])
    assert torch.equal(backend.embedding(ids, packed, weight_dtype), weight[ids])


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("out_features", "in_features", "group_size"),
    [(1, 8, 8), (33, 100, 200), (97, 256, 32), (70, 900, 136), (40, 1300, 1024)],
)
def test_packed_codes_equal_their_float_twin_row_by_row(
    backend: CpuBackend,
    out_features: int,
    in_features: int,
    group_size: int,
    symmetric: bool,
    bits: int,
    x_dtype: torch.dtype,
) -> None:
    torch.manual_seed(16)
    groups = -(-in_features // group_size)
    zeros = torch.full((out_features, groups), 2.0 ** (bits - 1))
    if not symmetric:
        zeros = torch.randint(2**bits + 1, (out_features, groups)).float()
    weight = QuantizedWeight(
        codes=torch.randint(2**bits, (out_features, in_features), dtype=torch.uint8),
        scales=torch.rand(out_features, groups) / 2**bits / in_features**0.5,
        zeros=zeros,
        group_size=group_size,
        bits=bits,
    )
    bias, x = torch.randn(out_features), torch.randn(150, in_features).to(x_dtype)
    packed = backend.pack_quantized(weight, bias)
    out = backend.linear(x, packed)
    expected = x.float() @ weight.dequantized().T + bias
    assert_near(out, expected.to(x_dtype))
    for rows in ([3], [0, 1], list(range(17)), list(range(70, 140))):
        assert torch.equal(backend.linear(x[rows], packed), out[rows]), rows


def test_packed_codes_take_their_bits_and_scales_and_no_more(backend: CpuBackend) -> None:
    codes, scales = torch.zeros(256, 1024, dtype=torch.uint8), torch.ones(256, 8)
    symmetric = backend.pack_quantized(QuantizedWeight(codes, scales, scales * 8, 128, 4))
    assert symmetric.num_bytes == 256 * 1024 // 2 + 256 * 8 * 4
    assert backend.pack_linear(torch.rand(256, 1024)).num_bytes == 256 * 1024 * 4
