"""Pinning host memory: what the driver is told, and what a refusal says."""

import pytest
import torch

from pagefleet.workers.pinned_memory import PinnedMemory, PinningFailed


class RecordingDriver:
    """CUDA's runtime as far as it is used: remembers, and answers with `error`."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if self.error == 0:
            self.registered[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return self.error


def test_exactly_the_tensors_memory_is_pinned_and_given_back_once() -> None:
    driver, tensor = RecordingDriver(), torch.empty(3, 7, dtype=torch.bfloat16)
    memory = PinnedMemory(tensor, driver)
    assert driver.registered == {tensor.data_ptr(): 42}
    memory.close()
    memory.close()
    assert driver.registered == {}


def test_a_refusal_says_how_much_and_what_to_do() -> None:
    with pytest.raises(PinningFailed, match=r"4 MiB .*CUDA error 2.*--host-memory"):
        PinnedMemory(torch.empty(2**20), RecordingDriver(error=2))
