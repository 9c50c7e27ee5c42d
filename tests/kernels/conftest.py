from collections.abc import Iterator

import pytest

from pagefleet.kernels import cpu_library
from pagefleet.kernels.cpu import CpuBackend

INSTRUCTION_SETS = ["portable", "avx2", "avx512", "avx512_bf16", "amx"]


@pytest.fixture(params=INSTRUCTION_SETS)
def backend(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    if not cpu_library.is_available():
        pytest.skip("the native library was not built")
    try:
        cpu_library.select_instruction_set(request.param)
    except cpu_library.NativeLibraryMissing:
        pytest.skip(f"no {request.param} here")
    yield CpuBackend(num_threads=2)
    cpu_library.select_instruction_set()
