"""Host memory that the GPU's copy engines may reach, so that a copy runs beside everything else.

Knows sizes and the driver's answers, no block. The memory is registered where it lies: torch's own
pinned allocator rounds up to a power of two, which for a pool can be as much again.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateImportUsage=false

import logging
from typing import Protocol, cast

import torch
from torch import Tensor

from .models.config import ModelError

logger = logging.getLogger(__name__)

_SUCCESS = 0
_PORTABLE = 1  # for every context of the process


class PinningFailed(ModelError):
    """The system or the driver does not pin so much."""


class Driver(Protocol):
    """The part of CUDA's runtime that is used; 0 = success."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int: ...

    def cudaHostUnregister(self, address: int) -> int: ...


class PinnedMemory:
    """A tensor's memory, pinned until `close`; a copy may then be `non_blocking`.

    driver: None = the process's CUDA runtime.
    """

    def __init__(self, tensor: Tensor, driver: Driver | None = None) -> None:
        self._driver = cast(Driver, torch.cuda.cudart()) if driver is None else driver
        self._tensor: Tensor | None = tensor
        size = tensor.numel() * tensor.element_size()
        error = int(self._driver.cudaHostRegister(tensor.data_ptr(), size, _PORTABLE))
        if error != _SUCCESS:
            raise PinningFailed(
                f"{size / 2**20:.0f} MiB of host memory cannot be pinned (CUDA error {error}):"
                " lower --host-memory, or raise the limit of locked memory (ulimit -l)"
            )

    def close(self) -> None:
        """Unpin. Nothing may be copying any more."""
        if self._tensor is None:
            return
        error = int(self._driver.cudaHostUnregister(self._tensor.data_ptr()))
        if error != _SUCCESS:
            logger.warning("host memory could not be unpinned (CUDA error %d)", error)
        self._tensor = None
