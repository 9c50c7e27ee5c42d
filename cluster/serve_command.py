"""`pagefleet serve`: a cluster that runs until it is told to stop.

Knows signals, the display of the start, and what is printed when the cluster is ready. The start
itself is `serve`'s.
"""

import json
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import FrameType

from rich.console import Console

from ..workers.checkpoint_folder import find_gguf
from ..workers.heap import give_back_freed
from ..workers.models.config import ModelError
from ..workers.models.families import read_config
from .config import HUB_ID, ClusterConfig, CommandError, NamedModel
from .models_command import fetch_default
from .serve import OnProgress, RunningCluster, running_cluster
from .tokenizer import Tokenizer

_CHECK_PERIOD_S = 5.0


def serve(config: ClusterConfig, console: Console, *, as_json: bool) -> None:
    """Start, say where it listens, and stay until SIGTERM or SIGINT.

    Nothing else comes on stdout, where Ray would tell of every worker that dies.
    """
    say, stdout = Console(stderr=True), sys.stdout
    with (
        until_signalled(),
        start_display(say) as on_progress,
        redirect_stdout(sys.stderr),
        running_cluster(resolve_models(config, say), on_progress) as cluster,
    ):
        with redirect_stdout(stdout):
            _announce(config, cluster, console, as_json=as_json)
        while True:
            time.sleep(_CHECK_PERIOD_S)
            cluster.check()


def resolve_models(config: ClusterConfig, console: Console) -> ClusterConfig:
    """The default model where none is named; a folder must be one, other names are hub ids."""
    return replace(config, models=tuple(_resolve(model, console) for model in config.models))


def _resolve(model: NamedModel, console: Console) -> NamedModel:
    if not model.checkpoint:
        return replace(model, checkpoint=str(fetch_default(console)))
    folder = Path(model.checkpoint).expanduser()
    if folder.is_dir():
        try:  # found out now, not once everything has started
            _check_folder(folder)
        except (OSError, ValueError, ModelError) as error:
            raise CommandError(str(error)) from error
        return replace(model, checkpoint=str(folder.resolve()))
    if HUB_ID.fullmatch(model.checkpoint) is None:
        raise CommandError(f"{model.checkpoint} is neither a folder nor a hub id like org/name")
    return model


def _check_folder(folder: Path) -> None:
    """What can be read without the weights."""
    is_gguf = find_gguf(folder) is not None
    if not is_gguf and not (folder / "config.json").is_file():
        raise CommandError(f"{folder} has no config.json: it is no checkpoint folder")
    Tokenizer.load(folder)
    give_back_freed()  # this process stays as long as the cluster, and needs no vocabulary
    if not is_gguf:
        read_config(folder)


@contextmanager
def until_signalled() -> Generator[None]:
    """The first SIGTERM or SIGINT ends the block, quietly; more of them change nothing."""
    was_signalled = False

    def end(signum: int, frame: FrameType | None) -> None:
        nonlocal was_signalled
        if not was_signalled:
            was_signalled = True
            raise KeyboardInterrupt  # the one exception that Ray's waits let through

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        yield
    except KeyboardInterrupt:
        return
    except SystemExit:  # raised by Ray's own handler, which stands while Ray starts
        return


@contextmanager
def start_display(console: Console) -> Generator[OnProgress]:
    """A spinner with what is being done and for how long; plain lines without a terminal."""
    began = time.monotonic()
    with console.status("") as status:

        def show(what: str) -> None:
            if console.is_terminal:
                status.update(what)
            console.print(f"[dim]{time.monotonic() - began:5.1f} s[/dim]  {what}", highlight=False)

        yield show


def _announce(
    config: ClusterConfig, cluster: RunningCluster, console: Console, *, as_json: bool
) -> None:
    addresses = cluster.addresses
    names = [model.name for model in config.models]
    if as_json:
        facts = {
            "models": names,
            "grpc": addresses.grpc,
            "http": addresses.http,
            "replicas": [
                {
                    "replica_id": info.replica_id,
                    "model": info.model,
                    "num_blocks": info.num_blocks,
                    "num_host_blocks": info.num_host_blocks,
                    "memory": info.memory,
                }
                for info in cluster.replicas
            ],
        }
        print(json.dumps(facts), flush=True)
        return
    for info in cluster.replicas:
        console.print(f"{info.replica_id}: {info.memory}", highlight=False, soft_wrap=True)
    verb = "is" if len(names) == 1 else "are"
    console.print(f"{', '.join(names)} {verb} ready", style="bold green", highlight=False)
    console.print(f"  gRPC  {addresses.grpc}", highlight=False)
    security = config.security
    scheme = "https" if security is not None and security.tls is not None else "http"
    console.print(f"  HTTP  {scheme}://{addresses.http}/v1", highlight=False)
    console.print(f"        {scheme}://{addresses.http}/dashboard", highlight=False)
    if security is None or not security.has_keys:
        console.print("  without API keys: whoever reaches it may use it", highlight=False)
    if config.host in ("127.0.0.1", "localhost", "::1"):
        console.print("  reachable from this machine only; --host opens it", highlight=False)
    console.print("Ctrl-C ends it.", highlight=False)
