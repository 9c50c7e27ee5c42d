"""The command line: flags, help texts, and which module does the work.

Knows the flags of what starts a cluster, looks at this machine, or needs neither; what talks to a
running cluster stands in `client_commands`. Does nothing itself, and imports what a command needs
only when that command runs: `pagefleet --help` must be quick.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..protos.errors import PagefleetError
from . import client_commands
from .client_commands import AsJson
from .config import (
    ClusterConfig,
    CommandError,
    NamedModel,
    name_models,
    parse_bytes,
    parse_faults,
)

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

# Under which headings `serve --help` lists its options.
_BLOCKS = "KV blocks"
_FULL = "When blocks run out"
_STEPS = "Steps"
_WEIGHTS = "Weights and device"
_ACCESS = "Keys and TLS"

_DEMO_BLOCKS = 256  # few enough to see single requests in the pictures of the pools


@app.command()
def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(help="A checkpoint folder or a hub id, org/name. Several serve several."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="What clients call it; the folder's name or the id. One per model."),
    ] = None,
    replicas: Annotated[int, typer.Option(help="How many copies of each model.")] = 1,
    tp: Annotated[int, typer.Option(help="Ranks (GPUs) that share one copy.")] = 1,
    host: Annotated[str, typer.Option(help="Where the servers listen.")] = "127.0.0.1",
    grpc_port: Annotated[int, typer.Option(help="0 = any free one.")] = 50051,
    http_port: Annotated[int, typer.Option(help="0 = any free one.")] = 8000,
    num_blocks: Annotated[
        int | None, typer.Option(help="KV pool of a replica, blocks.", rich_help_panel=_BLOCKS)
    ] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="The same in bytes, like 2GiB.", rich_help_panel=_BLOCKS)
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(help="The same as a share of the device's memory.", rich_help_panel=_BLOCKS),
    ] = None,
    block_size: Annotated[
        int, typer.Option(help="Tokens of a block.", rich_help_panel=_BLOCKS)
    ] = 16,
    host_memory: Annotated[
        str, typer.Option(help="Second tier of a replica, in bytes.", rich_help_panel=_BLOCKS)
    ] = "0",
    max_model_len: Annotated[
        int | None,
        typer.Option(help="The longest sequence; the model's own.", rich_help_panel=_STEPS),
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(help="Sequences in one batch.", rich_help_panel=_STEPS)
    ] = 256,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens in one step.", rich_help_panel=_STEPS)
    ] = 2048,
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Reuse blocks of prefixes.", rich_help_panel=_BLOCKS)
    ] = True,
    prefix_transfer: Annotated[
        bool,
        typer.Option(
            help="Copy prefixes between replicas; needs --host-memory.", rich_help_panel=_BLOCKS
        ),
    ] = True,
    preemption_mode: Annotated[
        str,
        typer.Option(
            help="When blocks run out: recompute, swap, or auto, the cheaper one.",
            rich_help_panel=_FULL,
        ),
    ] = "auto",
    admission_rule: Annotated[
        str,
        typer.Option(
            help="Blocks to enter the batch: for the known-length or full-length.",
            rich_help_panel=_FULL,
        ),
    ] = "known-length",
    watermark: Annotated[
        float,
        typer.Option(
            help="Share of the pool kept free for what runs already.", rich_help_panel=_FULL
        ),
    ] = 0.01,
    max_queue_s: Annotated[
        float | None,
        typer.Option(
            help="Refuse what would wait longer for its blocks, saying when to come.",
            rich_help_panel=_FULL,
        ),
    ] = None,
    max_num_waiting: Annotated[
        int | None,
        typer.Option(help="Requests that may wait at a replica; no bound.", rich_help_panel=_FULL),
    ] = None,
    speculative: Annotated[
        str,
        typer.Option(
            help="ngram: guess from what a sequence said before; or off.", rich_help_panel=_STEPS
        ),
    ] = "off",
    num_speculative_tokens: Annotated[
        int, typer.Option(help="Most tokens guessed ahead in a step.", rich_help_panel=_STEPS)
    ] = 5,
    prompt_lookup_min: Annotated[
        int,
        typer.Option(
            help="Last tokens that must have stood before, for a guess.", rich_help_panel=_STEPS
        ),
    ] = 2,
    prompt_lookup_max: Annotated[
        int, typer.Option(help="So many of them are compared.", rich_help_panel=_STEPS)
    ] = 5,
    overlap_steps: Annotated[
        bool | None,
        typer.Option(
            help="Schedule a step while the one before it runs; on a GPU by default.",
            rich_help_panel=_STEPS,
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="auto, float32 or bfloat16.", rich_help_panel=_WEIGHTS)
    ] = "auto",
    weight_dtype: Annotated[
        str,
        typer.Option(
            help="Of linears, on the CPU: bfloat16 or int8; auto: the least that loses nothing.",
            rich_help_panel=_WEIGHTS,
        ),
    ] = "auto",
    kv_dtype: Annotated[
        str,
        typer.Option(
            help="Of the KV cache: fp8 halves it; auto: as --dtype.", rich_help_panel=_BLOCKS
        ),
    ] = "auto",
    enforce_eager: Annotated[
        bool,
        typer.Option(
            "--enforce-eager", help="On GPUs, record no decode steps.", rich_help_panel=_STEPS
        ),
    ] = False,
    quantized_weights: Annotated[
        str,
        typer.Option(
            help="AWQ's and GPTQ's: packed, dequantized, or auto, packed if possible.",
            rich_help_panel=_WEIGHTS,
        ),
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=_WEIGHTS)
    ] = "auto",
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic", help="Results do not depend on the batch.", rich_help_panel=_STEPS
        ),
    ] = False,
    address: Annotated[
        str | None, typer.Option(help="A running Ray cluster; a private one is started without.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="Hashed API keys, see `pagefleet keys`; also from the env.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM; read again when it changes.", rich_help_panel=_ACCESS)
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="The certificate's key.", rich_help_panel=_ACCESS)
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(help="Clients need a certificate of this CA (mTLS).", rich_help_panel=_ACCESS),
    ] = None,
    inner_tls_cert: Annotated[
        Path | None,
        typer.Option(
            help="PEM, of streams to replicas; made at start where --tls-cert is given.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    inner_tls_key: Annotated[
        Path | None, typer.Option(help="That certificate's key.", rich_help_panel=_ACCESS)
    ] = None,
    inner_tls_ca: Annotated[
        Path | None, typer.Option(help="The authority of both ends.", rich_help_panel=_ACCESS)
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(help="Send a trace of each request there; also from OTEL_EXPORTER_OTLP_…."),
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="For tests, may be given several times: preempt-every=N, hash-bits=N, "
            "late-copies, nan-fill (blocks are NaN until written), guard-block."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Serve models over gRPC and HTTP until interrupted; SmolLM2-135M-Instruct without --model."""
    from .default_model import NAME
    from .security import SecurityError, security_from

    try:
        security = security_from(
            os.environ,
            api_key_file=api_key_file,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_client_ca=tls_client_ca,
            inner_tls=(inner_tls_cert, inner_tls_key, inner_tls_ca),
        )
    except SecurityError as error:
        raise CommandError(str(error)) from error
    if otlp_endpoint is not None:
        _send_traces(otlp_endpoint)
    names = served_model_name or []
    if model and "" in model:  # an unset variable of a script, say
        raise CommandError("--model is empty; without it the default model is served")
    config = ClusterConfig(
        models=name_models(model, names) if model else name_models([""], names or [NAME]),
        replicas=replicas,
        tp=tp,
        host=host,
        grpc_port=grpc_port,
        http_port=http_port,
        num_blocks=num_blocks,
        kv_memory=parse_bytes(kv_memory) if kv_memory else None,
        memory_fraction=gpu_memory_utilization,
        block_size=block_size,
        host_memory=parse_bytes(host_memory),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
        prefix_transfer=prefix_transfer,
        preemption_mode=preemption_mode,
        admission_rule=admission_rule,
        watermark=watermark,
        max_num_waiting=max_num_waiting,
        max_queue_s=max_queue_s,
        speculative=speculative,
        num_speculative_tokens=num_speculative_tokens,
        prompt_lookup_min=prompt_lookup_min,
        prompt_lookup_max=prompt_lookup_max,
        overlap_steps=overlap_steps,
        dtype=dtype,
        weight_dtype=weight_dtype,
        quantized_weights=quantized_weights,
        kv_dtype=kv_dtype,
        enforce_eager=enforce_eager,
        device=device,
        deterministic=deterministic,
        address=address,
        security=security,
        faults=parse_faults(fault or ()),
    )
    from .serve_command import serve as run

    run(config, Console(), as_json=as_json)


def _send_traces(endpoint: str) -> None:
    from ..workers.tracing import TracingUnavailable, send_traces_to

    try:
        send_traces_to(endpoint)
    except (ValueError, TracingUnavailable) as error:
        raise CommandError(f"--otlp-endpoint: {error}") from error


@app.command()
def keys(
    tenant: Annotated[str, typer.Argument(help="Whose key it will be.")],
    admin: Annotated[bool, typer.Option("--admin", help="May see and change the cluster.")] = False,
) -> None:
    """Make an API key: the key itself, and its entry for the file of `serve --api-key-file`.

    That file is {"keys": [ENTRY, …]}.
    """
    import json

    from .api_keys import digest_of, new_key

    key = new_key()
    entry = {"tenant": tenant, "sha256": digest_of(key).hex(), "admin": admin}
    Console().print_json(json.dumps({"key": key, "entry": entry}))


@app.command()
def demo(
    replicas: Annotated[int, typer.Option(help="How many copies of the model.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Start two replicas of the default model, ask a few questions, show the blocks, stop."""
    from .default_model import NAME

    config = ClusterConfig(
        models=(NamedModel("", NAME),),
        replicas=replicas,
        grpc_port=0,
        http_port=0,
        num_blocks=_DEMO_BLOCKS,
    )
    from .demo import demo as run

    run(config, Console(), as_json=as_json)


@app.command()
def probe(
    ready: Annotated[
        bool, typer.Option("--ready", help="Instead: does a gateway here take requests?")
    ] = False,
    until_idle: Annotated[
        float | None,
        typer.Option(help="Instead: wait so many seconds until no gateway here has requests."),
    ] = None,
    raylet: Annotated[
        str | None, typer.Option(help="Ray's agent, like 127.0.0.1:52365: is its node healthy?")
    ] = None,
    limit: Annotated[
        float, typer.Option(help="Seconds that a part may be silent, or make no step.")
    ] = 60.0,
    heartbeats: Annotated[
        Path | None, typer.Option(help="The folder of heartbeats.", envvar="PAGEFLEET_HEARTBEATS")
    ] = None,
) -> None:
    """For Kubernetes: fails if a gateway or replica on this machine is stuck; busy ones are fine.

    Needs PAGEFLEET_HEARTBEATS set to the same folder wherever they run.
    """
    from .probe_command import probe_alive, probe_raylet, probe_ready, wait_idle

    if heartbeats is None:
        raise CommandError("set PAGEFLEET_HEARTBEATS, or give --heartbeats, the folder to look in")
    if until_idle is not None:
        typer.echo(wait_idle(heartbeats, until_idle))
        return
    if raylet is not None:
        typer.echo(probe_raylet(raylet))
    typer.echo(probe_ready(heartbeats) if ready else probe_alive(heartbeats, limit))


@app.command()
def plan(
    model: Annotated[Path | None, typer.Option(help="A checkpoint folder.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers, without a folder.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads, without a folder.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Size of a head, without a folder.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", "--kv-dtype", help="Of the KV cache, like fp8; a folder's own."),
    ] = None,
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
    trace: Annotated[
        str, typer.Option(help="A trace of JSON lines, .gz or plain, or `synthetic`.")
    ] = "synthetic",
    policy: Annotated[
        list[str] | None, typer.Option(help="Routing policies; more names may follow it.")
    ] = None,
    more_policies: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...")] = None,
    replicas: Annotated[int, typer.Option(help="Replicas of the simulated cluster.")] = 8,
    blocks: Annotated[
        int | None, typer.Option(help="Blocks of a replica's pool; 3906, or 4096 for allocators.")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens of a block; 512, or 16 for allocators.")
    ] = None,
    load: Annotated[
        float | None, typer.Option(help="Prompt tokens over what can be prefilled; the trace's.")
    ] = None,
    cost_model: Annotated[
        str, typer.Option(help="replay: constant rates; steps: the real scheduler.")
    ] = "replay",
    requests: Annotated[int | None, typer.Option(help="Only so many of the trace.")] = None,
    fault: Annotated[
        list[str] | None, typer.Option(help="KIND:REPLICA:AT:DURATION, like crash:0:30:10.")
    ] = None,
    deadline: Annotated[float | None, typer.Option(help="Of every request, in seconds.")] = None,
    transfer_bandwidth: Annotated[
        float | None,
        typer.Option(help="GB/s at which replicas copy KV blocks from each other; none: not."),
    ] = None,
    kv_bytes_per_token: Annotated[int, typer.Option(help="Of all layers, for that.")] = 128 * 1024,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    allocators: Annotated[
        bool, typer.Option("--allocators", help="Compare ways to allocate memory instead.")
    ] = False,
    max_model_len: Annotated[int, typer.Option(help="Longest sequence, for allocators.")] = 8192,
    png: Annotated[Path | None, typer.Option(help="Write a plot there.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows there.")] = None,
) -> None:
    """Replay a trace through routing policies, or through memory allocators, without a GPU."""
    if allocators:
        from .plan_command import compare_allocators

        compare_allocators(
            Path(trace),
            num_slots=(blocks or 4096) * (block_size or 16),
            block_size=block_size or 16,
            max_length=max_model_len,
            num_requests=requests,
            png=png,
            json_file=json_file,
            console=Console(),
        )
        return
    from .simulate_command import SimulationOptions, parse_fault
    from .simulate_command import simulate as run

    options = SimulationOptions(
        trace=trace,
        policies=(*(policy or ["default"]), *(more_policies or [])),
        replicas=replicas,
        blocks=blocks or 3906,
        block_size=block_size or 512,
        load=load,
        cost_model=cost_model,
        requests=requests,
        faults=tuple(parse_fault(text) for text in fault or []),
        deadline_s=deadline,
        seed=seed,
        transfer_bytes_per_s=None if transfer_bandwidth is None else 1e9 * transfer_bandwidth,
        kv_bytes_per_token=kv_bytes_per_token,
    )
    run(options, console=Console(), json_file=json_file, png=png)


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


# After the commands above, as `--help` lists them.
app.registered_commands += client_commands.app.registered_commands


def main() -> None:
    """The entry point `pagefleet`: what a user can mend is one line, without a traceback."""
    try:
        app()
    except (CommandError, PagefleetError) as error:
        typer.echo(f"pagefleet: {error}", err=True)
        sys.exit(1)
