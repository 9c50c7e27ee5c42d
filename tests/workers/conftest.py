"""Fixtures for what runs a model."""

import pytest

from pagefleet.kernels import cpu_library
from pagefleet.kernels.select import ENVIRONMENT_VARIABLE


@pytest.fixture(params=["reference", "cpu"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each backend that runs on this machine, by name."""
    if request.param == "cpu" and not cpu_library.is_available():
        pytest.skip("the compiled kernels were not built")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, request.param)
    return request.param
