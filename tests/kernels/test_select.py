"""The choice of a backend: asked for by name, or the best that loads."""

import importlib.util

import pytest
import torch

from pagefleet.kernels import cpu_library, select
from pagefleet.kernels.select import ENVIRONMENT_VARIABLE, BackendUnavailable, select_backend

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def test_the_compiled_backend_is_chosen_where_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    expected = "cpu" if cpu_library.is_available() else "reference"
    assert select_backend(CPU, torch.float32).name == expected
    monkeypatch.setattr(cpu_library, "is_available", lambda: False)
    assert select_backend(CPU, torch.float32).name == "reference"


def test_a_name_is_obeyed_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "reference")
    assert select_backend(CPU, torch.float32).name == "reference"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "cpu")
    monkeypatch.setattr(cpu_library, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match="not built"):
        select_backend(CPU, torch.float32)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "fastest")
    with pytest.raises(BackendUnavailable, match="use reference, cpu, triton, flashinfer"):
        select_backend(CPU, torch.float32)


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_gpu_backends_are_refused_on_the_cpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, name)
    with pytest.raises(BackendUnavailable, match="needs a GPU, not cpu"):
        select_backend(CPU, torch.float32)


@pytest.mark.parametrize(
    ("installed", "dtype", "deterministic", "chosen"),
    [
        ("triton flashinfer", torch.bfloat16, False, "flashinfer"),
        ("triton flashinfer", torch.bfloat16, True, "triton"),
        ("triton flashinfer", torch.float32, False, "triton"),
        ("triton", torch.bfloat16, False, "triton"),
        ("", torch.bfloat16, False, "reference"),
    ],
)
def test_on_a_gpu_it_is_what_is_installed_and_computes_in_the_dtype(
    monkeypatch: pytest.MonkeyPatch,
    installed: str,
    dtype: torch.dtype,
    deterministic: bool,
    chosen: str,
) -> None:
    """Only the choice: nothing of a GPU is made here."""
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    made: list[str] = []
    monkeypatch.setattr(select, "_make", lambda name, *_: made.append(name))
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name if name in installed.split() else None
    )
    monkeypatch.setattr(importlib, "import_module", lambda name: None)
    select_backend(CUDA, dtype, deterministic)
    assert made == [chosen]
