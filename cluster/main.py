"""The command line: flags, help texts, and which module does the work.

Knows every flag and its default. Does nothing itself, and imports what a command needs only when
that command runs: `pagefleet --help` must be quick.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .config import CommandError, parse_bytes

# Nothing here reports to anyone; set before Ray or the hub's client is imported.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

app = typer.Typer(
    name="pagefleet",
    help="A serving cluster for large language models, built around KV blocks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
models_app = typer.Typer(help="Checkpoints on this machine.", no_args_is_help=True)
app.add_typer(models_app, name="models")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Dtype = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]


@app.command()
def plan(
    model: Annotated[Path | None, typer.Option(help="A checkpoint folder.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers, without a folder.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads, without a folder.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Size of a head, without a folder.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the KV cache; a folder's own.")] = None,
    tp: Annotated[int, typer.Option(help="Ranks that share the heads.")] = 1,
    kv_memory: Annotated[str, typer.Option(help="KV pool of one rank.")] = "16GiB",
    lengths: Annotated[str, typer.Option(help="Like 7,11,10 or 1000x100.")] = "1000x100",
    block_size: Annotated[str | None, typer.Option(help="Sizes to compare, like 16,32.")] = None,
    as_json: AsJson = False,
) -> None:
    """Bytes per token, blocks, waste per block size, and how many sequences a pool holds."""
    from .plan_command import parse_numbers, print_plan, resolve_shape

    print_plan(
        resolve_shape(model, layers, kv_heads, head_dim, dtype, tp),
        parse_bytes(kv_memory),
        parse_numbers(lengths, "--lengths"),
        parse_numbers(block_size, "--block-size") if block_size else None,
        as_json=as_json,
        console=Console(),
    )


@app.command()
def simulate(
    trace: Annotated[Path, typer.Option(help="JSON lines with `in` and `out`, .gz or plain.")],
    allocators: Annotated[
        bool, typer.Option("--allocators", help="Compare ways to allocate memory.")
    ] = False,
    blocks: Annotated[int, typer.Option(help="Blocks of a replica's pool.")] = 4096,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    max_model_len: Annotated[int, typer.Option(help="The longest sequence allowed.")] = 8192,
    num_requests: Annotated[int, typer.Option(help="How much of the trace is used.")] = 2000,
    png: Annotated[Path | None, typer.Option(help="Write a plot there.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows there.")] = None,
) -> None:
    """Replay a trace through models of the memory, without a GPU."""
    from .plan_command import compare_allocators

    compare_allocators(
        trace,
        num_slots=blocks * block_size,
        block_size=block_size,
        max_length=max_model_len,
        num_requests=num_requests,
        png=png,
        json_file=json_file,
        console=Console(),
    )


@models_app.command("list")
def models_list(as_json: AsJson = False) -> None:
    """The default model and the hub's cache, with sizes and folders."""
    from dataclasses import asdict

    from .models_command import list_models, models_table

    models = list_models()
    if as_json:
        Console().print_json(data=[asdict(model) for model in models])
    else:
        Console().print(models_table(models))


@models_app.command("fetch")
def models_fetch(
    model: Annotated[
        str | None, typer.Argument(help="A hub id, org/name; the default model where absent.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Download a checkpoint into the local cache, once, and print its folder."""
    from .models_command import fetch_default, fetch_from_hub

    folder = fetch_from_hub(model) if model else fetch_default(Console(stderr=True))
    if as_json:
        Console().print_json(data={"folder": str(folder)})
    else:
        typer.echo(str(folder))


def main() -> None:
    """The entry point `pagefleet`: what a user can mend is one line, without a traceback."""
    try:
        app()
    except CommandError as error:
        typer.echo(f"pagefleet: {error}", err=True)
        sys.exit(1)
