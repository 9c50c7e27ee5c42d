"""Arrays of a step on their way to the device, and back, without waiting for it."""
# pyright: reportUnknownMemberType=false

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array as a tensor there; on the CPU the same memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    # A pinned buffer of its own each time: torch keeps it until the copy has ended, so that the
    # next step cannot overwrite it.
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_into(array: NDArray[np.generic], target: Tensor) -> None:
    """Into a tensor on the device that stays where it is."""
    tensor = torch.from_numpy(array)
    if target.is_cuda:
        tensor = tensor.pin_memory()
    target.copy_(tensor, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """A copy that is whole once the step's `Download`, asked for later, has come; on the CPU the
    tensor itself."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class Download:
    """A tensor of a GPU on its way to the host, while others go on."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = to_host(tensor)
        self._event = torch.cuda.Event()
        self._event.record()

    def result(self) -> NDArray[np.int64]:
        """Once it is there; waits for this copy alone, not for what was launched after it."""
        self._event.synchronize()
        return self._host.numpy()
