"""The choice of a backend: asked for by name, or the best that loads."""

import pytest
import torch

from pagefleet.kernels import cpu
from pagefleet.kernels.select import ENVIRONMENT_VARIABLE, BackendUnavailable, select_backend

CPU = torch.device("cpu")


def test_the_compiled_backend_is_chosen_where_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    expected = "cpu" if cpu.is_available() else "reference"
    assert select_backend(CPU, torch.float32).name == expected
    monkeypatch.setattr(cpu, "is_available", lambda: False)
    assert select_backend(CPU, torch.float32).name == "reference"


def test_a_name_is_obeyed_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "reference")
    assert select_backend(CPU, torch.float32).name == "reference"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "cpu")
    monkeypatch.setattr(cpu, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match="not built"):
        select_backend(CPU, torch.float32)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "fastest")
    with pytest.raises(BackendUnavailable, match="use reference or cpu"):
        select_backend(CPU, torch.float32)
