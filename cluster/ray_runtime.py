"""A private Ray cluster of this process, or a running one that it joins. Knows nothing of serving.

A bare `ray.init()` joins whatever cluster it finds on the machine; here it is always one or the
other, on purpose.
"""

# Ray is not wholly typed.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

import logging
import os
import signal
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from uuid import uuid4

# Ray reads these while it is imported, or while a cluster starts.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# A call without a session would quietly start a cluster of its own, or join whatever it finds.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
# By itself it gives every worker a nice value of 15: replicas and gateways would then get next to
# nothing of a machine on which anything else runs, an ordinary client of theirs for one.
os.environ.setdefault("RAY_worker_niceness", "0")
# It would start a process for each core ahead, and no actor takes one: they lack its environment.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..workers.openmp import WAITS
from .config import CommandError
from .scratch_folder import scratch_folder

_OBJECT_STORE_BYTES = 100 * 2**20  # control messages only: weights and tokens never pass it
_START_ATTEMPTS = 2  # a busy machine can miss Ray's fixed limit of 30 s for a node's start


@contextmanager
def ray_session(address: str | None, num_cpus: int | None = None) -> Generator[None]:
    """Ray while the block runs. address None = a private cluster on this machine, gone at the end.

    num_cpus: what the private cluster may schedule; None = this machine's cores.
    """
    with ExitStack() as stack:
        if address is None:
            start = partial(_start, stack.enter_context(scratch_folder()), num_cpus)
        else:
            start = partial(_join, address)
        stack.callback(ray.shutdown)
        start()
        yield


@contextmanager
def _signals_held() -> Generator[None]:
    """Ctrl-C in the middle of `ray.init` can crash it and leave its processes behind: it is acted
    on right after. `ray.init` takes SIGTERM for itself; afterwards it is this process's again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) or signal.SIG_DFL for number in numbers]
    held: list[int] = []
    for number in numbers:
        signal.signal(number, lambda signum, frame: held.append(signum))
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


def on_this_node(*, soft: bool) -> NodeAffinitySchedulingStrategy:
    """Where the caller is: what listens on its addresses, or has to go when it goes.

    soft: elsewhere rather than nowhere, once this node is lost.
    """
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft)


def _worker_environment() -> dict[str, str]:
    """What every actor's process finds: before it loads OpenMP, and where its spans go."""
    traces = {name: value for name, value in os.environ.items() if name.startswith("OTEL_")}
    return {**WAITS, **traces}


def _join(address: str) -> None:
    try:
        with _signals_held():
            ray.init(
                address=address,
                namespace=f"pagefleet-{uuid4().hex[:8]}",
                runtime_env={"env_vars": _worker_environment()},
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise CommandError(f"no Ray cluster answers at {address}: {error}") from error


def _start(folder: Path, num_cpus: int | None) -> None:
    for attempt in range(1, _START_ATTEMPTS + 1):
        try:
            with _signals_held():  # a signal leaves the loop, whether it has started or not
                ray.init(
                    address="local",
                    namespace="pagefleet",
                    num_cpus=num_cpus,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    include_dashboard=False,
                    runtime_env={"env_vars": _worker_environment()},
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=str(folder / str(attempt)),
                )
        except Exception as error:  # Ray has no class of its own for a node that is too slow
            ray.shutdown()
            if attempt == _START_ATTEMPTS:
                raise CommandError(f"Ray could not be started on this machine: {error}") from error
        else:
            return
