"""`pagefleet generate`: one prompt to a running cluster, its answer as it comes.

Knows the client and the console. Knows no model; whether a prompt is a chat is the server's to say.
"""

from dataclasses import asdict

from rich.console import Console

from ..protos.messages import SamplingParams
from .client import Client
from .client_messages import Chat, Completion, Model, Prompt
from .config import CommandError


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
