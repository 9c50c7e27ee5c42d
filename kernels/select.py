"""The choice of a kernel backend: the fastest that loads here, or the one the user names."""
# pyright: reportUnknownMemberType=false

import importlib
import importlib.util
import logging
import os

import torch

from . import cpu, cpu_library
from .backend import KernelBackend
from .reference import ReferenceBackend

ENVIRONMENT_VARIABLE = "PAGEFLEET_KERNELS"
NAMES = ("reference", "cpu", "triton", "flashinfer")

logger = logging.getLogger(__name__)


class BackendUnavailable(RuntimeError):
    """The backend that was asked for by name cannot run here."""


def select_backend(
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool = False,
    weight_dtype: torch.dtype | None = None,
) -> KernelBackend:
    """On a GPU `flashinfer` where it is installed and computes in `dtype`, else `triton`; on the
    CPU `cpu` (compiled) where its library loads; else `reference`.

    The environment variable PAGEFLEET_KERNELS overrides; a backend asked for by name that cannot
    be had is an error, never a silent fallback.

    weight_dtype: of the weights of linears where it is not `dtype`: `cpu` alone has that.
    """
    wanted = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if wanted not in ("", *NAMES):
        raise BackendUnavailable(f"{ENVIRONMENT_VARIABLE}={wanted!r}: use {', '.join(NAMES)}")
    for name in (wanted,) if wanted else _preferred(device, dtype, deterministic):
        obstacle = _obstacle(name, device, deterministic)
        if obstacle is None and name != "cpu" and weight_dtype is not None:
            raise BackendUnavailable(
                f"weights of {weight_dtype} beside {dtype}: only the compiled CPU kernels do that,"
                f" here {name} would be used"
            )
        if obstacle is None:
            return _make(name, device, deterministic, weight_dtype)
        if wanted:
            raise BackendUnavailable(f"{ENVIRONMENT_VARIABLE}={name}: {obstacle}")
    raise AssertionError("the reference runs anywhere")


def _preferred(device: torch.device, dtype: torch.dtype, deterministic: bool) -> tuple[str, ...]:
    if device.type != "cuda":
        return ("cpu", "reference")
    if deterministic or dtype == torch.float32:
        return ("triton", "reference")
    return ("flashinfer", "triton", "reference")


def _obstacle(name: str, device: torch.device, deterministic: bool) -> str | None:
    """Why the backend cannot run here; None = it can."""
    if name == "cpu" and not (device.type == "cpu" and cpu_library.is_available()):
        return f"the compiled library is not built, or not for {device}"
    if name in ("triton", "flashinfer"):
        if device.type != "cuda":
            return f"it needs a GPU, not {device}"
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
    if name == "flashinfer":
        if deterministic:
            return "its results depend on the batch: --deterministic takes triton"
        return _flashinfer_obstacle()
    return None


def _flashinfer_obstacle() -> str | None:
    if importlib.util.find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed: pip install 'pagefleet[cuda]'"
    try:
        importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning("flashinfer is installed and cannot be imported: %s", error)
        return f"flashinfer cannot be imported: {error}"
    return None


def _make(
    name: str, device: torch.device, deterministic: bool, weight_dtype: torch.dtype | None
) -> KernelBackend:
    if name == "cpu":
        return cpu.CpuBackend(deterministic, weight_dtype=weight_dtype)
    if name == "reference":
        return ReferenceBackend(deterministic)
    # Each imports what only a GPU machine has.
    if name == "triton":
        from .triton_backend import TritonBackend

        return TritonBackend(deterministic)
    from .flashinfer_backend import FlashInferBackend

    return FlashInferBackend(device)
