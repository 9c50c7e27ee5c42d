"""`pagefleet demo`: two replicas of the default model answer questions and show their blocks.

Knows what is shown and when. The cluster is `serve`'s, the questions are `demo_workload`'s.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import cast

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ..protos import inference_pb2 as pb
from .client import Client
from .config import ClusterConfig, CommandError
from .demo_workload import DemoResult, run_workload
from .serve import OnProgress, running_cluster
from .serve_command import resolve_models, start_display, until_signalled
from .status_view import leftover_blocks, message_as_json, pool_table, replica_table

_SETTLE_S = 10.0  # by then the last reports have told of blocks that came back
_POLL_S = 0.05


def demo(config: ClusterConfig, console: Console, *, as_json: bool) -> None:
    """The whole demo; JSON has stdout for itself."""
    say = Console(stderr=True) if as_json else console
    is_complete = False
    with until_signalled(), start_display(Console(stderr=True)) as on_progress:
        report = _run(resolve_models(config, say), say, on_progress)
        is_complete = True
        if as_json:
            console.print_json(data=report)
    if not is_complete:
        raise CommandError("the demo was interrupted; nothing of it is left running")


def _run(config: ClusterConfig, say: Console, on_progress: OnProgress) -> dict[str, object]:
    """Start, show the pools, ask, show the answers and the pools again, and stop."""
    with running_cluster(config, on_progress) as cluster, Client(cluster.addresses.grpc) as client:
        for info in cluster.replicas:
            say.print(f"{info.replica_id}: {info.memory}", highlight=False, soft_wrap=True)
        before = client.cluster_state()
        say.print("\n[bold]Pools before[/bold]", pool_table(before), sep="\n")
        say.print("\n[bold]Requests[/bold], over gRPC, streamed")
        results = asyncio.run(
            run_workload(cluster.addresses.grpc, lambda result: _print_result(result, say))
        )
        after = _settled_state(client)
        say.print("\n[bold]Pools after[/bold]", pool_table(after), sep="\n")
        say.print("", replica_table(after), sep="\n")
    if leftover_blocks(after):
        raise CommandError(f"{leftover_blocks(after)} blocks were not given back")
    say.print("\nNothing runs any more: every block was clean, or kept for the next prompt.")
    return _as_json(before, results, after)


def _print_result(result: DemoResult, console: Console) -> None:
    """A line of facts, then the text of each sample."""
    console.print(_facts(result), soft_wrap=True)
    for index, text in sorted(result.texts.items()):
        label = f"[{index}] " if len(result.texts) > 1 else ""
        ending = " …" if result.was_cancelled else ""
        shown = Text(label + " ".join(text.split()) + ending)
        console.print(Padding(shown, (0, 0, 0, 4)))


def _facts(result: DemoResult) -> Text:
    request = result.request
    line = Text(f"{request.name:<10}", style="bold")
    line.append(f"{request.question}  ", style="not bold cyan")
    if result.first_token_s is not None:
        line.append(f"first token {1000 * result.first_token_s:.0f} ms", style="not bold")
    if result.was_cancelled:
        line.append(f", cancelled after {result.num_tokens} tokens", style="not bold")
    if result.usages:
        usage = result.usages[min(result.usages)]
        computed = usage.prompt_tokens - usage.cached_tokens
        facts = f", {usage.replica}, prompt {usage.cached_tokens} cached + {computed} computed"
        line.append(f"{facts}, {result.num_tokens} generated", style="not bold")
    return line


def _settled_state(client: Client) -> pb.GetClusterStateResponse:
    """The state once the reports have caught up with the last request's end."""
    deadline = time.monotonic() + _SETTLE_S
    state = client.cluster_state()
    while time.monotonic() < deadline and (
        leftover_blocks(state) or any(replica.num_running for replica in state.replicas)
    ):
        time.sleep(_POLL_S)
        state = client.cluster_state()
    return state


def _as_json(
    before: pb.GetClusterStateResponse,
    results: Sequence[DemoResult],
    after: pb.GetClusterStateResponse,
) -> dict[str, object]:
    return {
        "before": message_as_json(before),
        "requests": [_result_as_json(result) for result in results],
        "after": message_as_json(after),
    }


def _result_as_json(result: DemoResult) -> dict[str, object]:
    usages = {str(index): asdict(usage) for index, usage in result.usages.items()}
    return {
        "name": result.request.name,
        "question": result.request.question,
        "first_token_s": result.first_token_s,
        "generated_tokens": result.num_tokens,
        "cancelled": result.was_cancelled,
        "texts": cast("dict[str, object]", {str(i): text for i, text in result.texts.items()}),
        "usage": usages,
    }
