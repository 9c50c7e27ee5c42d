"""Fixtures for every folder."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One private Ray cluster for the whole session: starting one costs seconds of CPU."""
    # here, because Ray takes a second to import and most tests do without it
    from pagefleet.cluster.ray_runtime import ray_session

    with ray_session(None, num_cpus=16):
        yield
