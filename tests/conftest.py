"""Fixtures for every folder."""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Read when Triton is imported, by whomever first: here its kernels are interpreted. What runs them
# on a GPU is a process of its own (tests/gpu).
os.environ["TRITON_INTERPRET"] = "1"
# Read when Ray is imported: who uses it without a session fails, and starts no small one unnoticed.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
# Who was started in the background ignores Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A busy machine is no failure: how long an example takes is for the benchmarks to say.
settings.register_profile("pagefleet", deadline=None)
settings.load_profile("pagefleet")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One private Ray cluster for the whole session: starting one costs seconds of CPU."""
    # here, because Ray takes a second to import and most tests do without it
    from pagefleet.cluster.ray_runtime import ray_session

    with ray_session(None, num_cpus=16):
        yield
