"""The choice of a kernel backend: the fastest that loads here, or the one the user names."""

import os

import torch

from . import cpu
from .backend import KernelBackend
from .reference import ReferenceBackend

ENVIRONMENT_VARIABLE = "PAGEFLEET_KERNELS"


class BackendUnavailable(RuntimeError):
    """The backend that was asked for by name cannot run here."""


def select_backend(
    device: torch.device, dtype: torch.dtype, deterministic: bool = False
) -> KernelBackend:
    """`cpu` (compiled) where its library loads, else `reference`.

    The environment variable PAGEFLEET_KERNELS=reference|cpu overrides; a backend asked for by
    name that cannot be had is an error, never a silent fallback.
    """
    wanted = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if wanted not in ("", "reference", "cpu"):
        raise BackendUnavailable(f"{ENVIRONMENT_VARIABLE}={wanted!r}: use reference or cpu")
    can_compiled = device.type == "cpu" and cpu.is_available()
    if wanted == "cpu" and not can_compiled:
        raise BackendUnavailable(
            f"{ENVIRONMENT_VARIABLE}=cpu: the compiled library is not built, or not for {device}"
        )
    if wanted == "reference" or not can_compiled:
        return ReferenceBackend(deterministic)
    return cpu.CpuBackend(deterministic)
