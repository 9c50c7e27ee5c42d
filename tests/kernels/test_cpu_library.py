import os
import sys

import pytest
import torch

from pagefleet.kernels import cpu_library
from pagefleet.kernels.cpu import CpuBackend


def test_the_library_is_there_when_the_build_was_required() -> None:
    if os.environ.get("PAGEFLEET_REQUIRE_NATIVE") != "1":
        pytest.skip("the native library is optional here")
    assert cpu_library.is_available()


def test_one_openmp_runtime_serves_torch_and_the_kernels(backend: CpuBackend) -> None:
    backend.linear(torch.randn(4, 64), backend.pack_linear(torch.randn(64, 64)))
    with open("/proc/self/maps") as maps:
        runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line}
    assert len(runtimes) <= 1, runtimes


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it counts Linux's threads")
def test_a_team_ends_and_comes_again(backend: CpuBackend) -> None:
    weight, x = backend.pack_linear(torch.randn(512, 512)), torch.randn(64, 512)
    expected = backend.linear(x, weight)
    num_threads = len(os.listdir("/proc/self/task"))
    cpu_library.end_team()
    assert len(os.listdir("/proc/self/task")) < num_threads
    assert torch.equal(backend.linear(x, weight), expected)
    assert len(os.listdir("/proc/self/task")) <= num_threads


def test_a_set_that_is_not_there_is_refused_by_name() -> None:
    if not cpu_library.is_available():
        pytest.skip("the native library was not built")
    before = cpu_library.select_instruction_set()
    with pytest.raises(cpu_library.NativeLibraryMissing, match="sse9"):
        cpu_library.select_instruction_set("sse9")
    assert cpu_library.select_instruction_set() == before
