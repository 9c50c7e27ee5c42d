"""Arrays of a step on their way to the device, without waiting for it."""
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
