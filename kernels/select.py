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
    if wanted == "reference":
        return ReferenceBackend(deterministic)
    if device.type == "cpu" and cpu.is_available():
        return cpu.CpuBackend(deterministic)
    if wanted == "cpu":
        raise BackendUnavailable(
            f"{ENVIRONMENT_VARIABLE}=cpu: the compiled library is not built, or not for {device}"
        )
    return ReferenceBackend(deterministic)
