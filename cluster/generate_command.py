"""`pagefleet generate` and `explain`: one prompt to a running cluster, its answer or its route.

Knows the client and the console. Knows no model; whether a prompt is a chat is the server's to say.
"""

from dataclasses import asdict

from rich.console import Console

from ..protos.messages import SamplingParams
from .client import Client
from .client_messages import Chat, Completion, Model, Prompt
from .config import CommandError
from .status_view import message_as_json
from .tables import make_table


def generate(
    target: str,
    text: str,
    sampling: SamplingParams,
    *,
    model: str,
    system: str,
    raw: bool,
    as_json: bool,
    console: Console,
) -> None:
    """Stream a single answer; several samples, or JSON, are printed at their end."""
    with Client(target) as client:
        prompt = _make_prompt(client, text, model, system, raw)
        if as_json or sampling.n > 1:
            completion = client.generate(prompt, sampling, model=model)
            _print_whole(completion, as_json, console)
            return
        for part in client.stream(prompt, sampling, model=model):
            console.out(part.text, end="", highlight=False)
        console.out("")


def explain(
    target: str,
    text: str,
    sampling: SamplingParams,
    *,
    model: str,
    system: str,
    raw: bool,
    as_json: bool,
    console: Console,
) -> None:
    """What the controller would do with the prompt now, and every term of its choice."""
    with Client(target) as client:
        answer = client.explain(
            _make_prompt(client, text, model, system, raw), sampling, model=model
        )
    if as_json:
        console.print_json(data=message_as_json(answer))
        return
    table = make_table(
        (
            "replica",
            "hit",
            "free",
            "prefill",
            "load",
            "queue",
            "blocks",
            "batch",
            "other",
            "copy",
            "total",
        )
    )
    for replica in answer.replicas:
        times = (
            replica.prefill_ms,
            replica.load_ms,
            replica.queue_ms,
            replica.blocks_ms,
            replica.batch_ms,
            replica.affinity_ms,
            replica.transfer_ms,
            replica.total_ms,
        )
        hits = replica.hit_tokens + replica.host_hit_tokens
        row = (replica.replica_id, f"{hits:,}", f"{replica.available_blocks:,}")
        table.add_row(*row, *(f"{value:,.1f}" for value in times))
    console.print(table)
    # not in the header, which would not fit 80 columns
    console.print("prefill to total: ms", highlight=False)
    chosen = f" {answer.replica_id}" if answer.replica_id else ""
    console.print(
        f"{answer.decision}{chosen}: {answer.reason or answer.policy}; "
        f"{answer.prompt_tokens:,} prompt tokens, a lease of {answer.lease_blocks:,} blocks, "
        f"expected wait {answer.expected_wait_s:.2f} s",
        highlight=False,
        soft_wrap=True,
    )


def _make_prompt(client: Client, text: str, model: str, system: str, raw: bool) -> Prompt:
    if raw:
        return text
    if not _find_model(client, model).has_chat_template:
        if system:
            raise CommandError("the model has no chat template: --system cannot be used")
        return text
    messages = [{"role": "system", "content": system}] if system else []
    return Chat([*messages, {"role": "user", "content": text}])


def _find_model(client: Client, name: str) -> Model:
    models = client.models()
    found = [m for m in models if name in ("", m.id, *m.aliases)]
    if len(found) != 1:
        served = ", ".join(m.id for m in models) or "none"
        raise CommandError(f"--model {name!r} does not name one model; served: {served}")
    return found[0]


def _print_whole(completion: Completion, as_json: bool, console: Console) -> None:
    if as_json:
        console.print_json(data=asdict(completion))
        return
    for output in completion.outputs:
        console.out(f"[{output.index}] {output.text}", highlight=False)
