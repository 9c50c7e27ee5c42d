"""Starting Ray where it fails; the rest needs Ray itself and is tested with whole clusters.

Who replaces `ray.init` replaces `ray.shutdown` too: other tests of this process share a cluster.
"""

import os
import signal

import pytest
import ray

from pagefleet.cluster.config import CommandError
from pagefleet.cluster.ray_runtime import ray_session


def test_a_node_that_is_too_slow_twice_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[str] = []

    def init(*, _temp_dir: str, **options: object) -> None:
        folders.append(_temp_dir)
        # what Ray raises when its fixed limit for a node's start has passed
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with pytest.raises(CommandError, match="timed out during startup"), ray_session(None):
        pass
    assert len(folders) == len(set(folders)) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_ray_starts_is_acted_on_afterwards(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    events: list[str] = []

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    def init(**options: object) -> None:
        signal.raise_signal(number)
        events.append("started")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: events.append("shut down"))
    before = signal.signal(number, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), ray_session(None):
            events.append("used")
        assert signal.getsignal(number) is interrupt
    finally:
        signal.signal(number, before)
    assert events == ["started", "shut down"]


def test_after_a_signal_there_is_no_second_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[str] = []

    def init(*, _temp_dir: str, **options: object) -> None:
        attempts.append(_temp_dir)
        signal.raise_signal(signal.SIGINT)
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with pytest.raises(KeyboardInterrupt), ray_session(None):
        pass
    assert len(attempts) == 1


@pytest.mark.ray
def test_a_worker_has_the_priority_of_who_started_the_cluster(ray_cluster: None) -> None:
    niceness = ray.remote(num_cpus=0)(lambda: os.nice(0))
    assert ray.get(niceness.remote()) == os.nice(0)
