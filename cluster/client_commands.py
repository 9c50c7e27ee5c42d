"""The commands that talk to a running cluster: flags, help texts, and which module does the work.

They know a gateway's address and nothing else of the cluster. As in `main`, what a command needs
is imported when it runs.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .config import CommandError

app = typer.Typer()

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Server = Annotated[str, typer.Option(help="A gateway's gRPC address.")]
ModelName = Annotated[str, typer.Option(help="Where more than one is served.")]
_SERVER = "127.0.0.1:50051"


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="A message, or with --raw a text to continue.")],
    server: Server = _SERVER,
    model: ModelName = "",
    system: Annotated[str, typer.Option(help="A system prompt.")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="Without the chat template.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Up to the model's context.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="1 = off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 = off.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Drawn by the gateway.")] = None,
    n: Annotated[int, typer.Option("-n", "--n", help="Samples of the answer.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="May be given several times.")] = None,
    as_json: AsJson = False,
) -> None:
    """Send a prompt to a running cluster and print the answer as it comes."""
    from ..protos.messages import SamplingParams
    from .generate_command import generate as run

    run(
        server,
        prompt,
        SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            n=n,
            stop=tuple(stop or ()),
        ),
        model=model,
        system=system,
        raw=raw,
        as_json=as_json,
        console=Console(),
    )


@app.command()
def status(server: Server = _SERVER, as_json: AsJson = False) -> None:
    """Replicas of a running cluster and the blocks of their pools."""
    from .client import Client
    from .status_view import message_as_json, status_view

    with Client(server) as client:
        state = client.cluster_state()
    if as_json:
        Console().print_json(data=message_as_json(state))
    else:
        Console().print(status_view(state))


@app.command()
def top(
    server: Server = _SERVER,
    period: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
) -> None:
    """Pools, decisions, queue and leases as they change, until Ctrl-C."""
    from .top_command import watch

    watch(server, period, Console())


@app.command()
def explain(
    prompt: Annotated[str, typer.Argument(help="A message, or with --raw a text to continue.")],
    server: Server = _SERVER,
    model: ModelName = "",
    system: Annotated[str, typer.Option(help="A system prompt.")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="Without the chat template.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Up to the model's context.")] = 256,
    n: Annotated[int, typer.Option("-n", "--n", help="Samples of the answer.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Where a prompt would go, and why: hits, and every term of the cost, per replica."""
    from ..protos.messages import SamplingParams
    from .generate_command import explain as run

    sampling = SamplingParams(max_tokens=max_tokens, n=n)
    run(
        server,
        prompt,
        sampling,
        model=model,
        system=system,
        raw=raw,
        as_json=as_json,
        console=Console(),
    )


@app.command("reset-cache")
def reset_cache(
    model: Annotated[str, typer.Option(help="Of this model only.")] = "",
    server: Server = _SERVER,
) -> None:
    """Forget every cached prefix on every tier; returns once each replica has done so."""
    from .client import Client

    with Client(server) as client:
        answer = client.reset_prefix_cache(model)
    for reset in answer.replicas:
        typer.echo(f"{reset.replica_id}: {reset.num_blocks} blocks, epoch {reset.epoch}")


@app.command("update-weights")
def update_weights(
    checkpoint: Annotated[
        str, typer.Argument(help="A folder that every node sees, or a hub id, org/name.")
    ],
    model: ModelName = "",
    server: Server = _SERVER,
    timeout: Annotated[
        float, typer.Option(help="Seconds for streams at the last replica of their weights.")
    ] = 600.0,
) -> None:
    """Other weights for a model: one replica after the other, no stream lost or mixed."""
    from .client import Client

    folder = Path(checkpoint).expanduser()
    path = str(folder.resolve()) if folder.is_dir() else checkpoint
    with Client(server) as client:
        version = client.update_weights(path, model, timeout)
    typer.echo(f"version {version} comes in; `pagefleet status` shows who has it")


@app.command()
def drain(
    replica: Annotated[str, typer.Argument(help="Its id, as `status` shows it.")],
    server: Server = _SERVER,
    timeout: Annotated[
        float, typer.Option(help="Seconds that its streams may go on there.")
    ] = 30.0,
) -> None:
    """Take a replica out: its streams end, or go on elsewhere, and then it goes for good."""
    from .client import Client

    with Client(server) as client:
        client.drain(replica, timeout)
    typer.echo(f"{replica} drains; `pagefleet status` shows it until it has gone")


@app.command()
def bench(
    server: Server = _SERVER,
    model: ModelName = "",
    num_requests: Annotated[int, typer.Option(help="How many in all.")] = 64,
    concurrency: Annotated[int, typer.Option(help="How many at once, at most.")] = 16,
    request_rate: Annotated[
        float | None, typer.Option(help="Arrivals per second; without, as fast as they end.")
    ] = None,
    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    prefix_len: Annotated[int, typer.Option(help="Tokens that all prompts share.")] = 0,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Put load on a running cluster and measure what its clients see."""
    from .bench_command import BenchLoad, run_bench

    load = BenchLoad(
        num_requests=num_requests,
        concurrency=concurrency,
        input_len=input_len,
        output_len=output_len,
        prefix_len=prefix_len,
        request_rate=request_rate,
        seed=seed,
    )
    report = run_bench(server, model, load, as_json=as_json, console=Console())
    if report.num_failed:
        raise CommandError(f"{report.num_failed} requests failed: {report.first_error}")
