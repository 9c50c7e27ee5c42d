"""The workload of `pagefleet demo`: prompts, how each is sent, and what came of each.

Knows the client. Knows nothing of how the cluster was started or where its output is shown.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from ..protos.messages import SamplingParams
from .client import AsyncClient
from .client_messages import Chat, Completion
from .generation import GenerationUsage

# Long enough that sharing it saves more work than any of the questions makes.
SYSTEM_PROMPT = (
    "You are the guide of a small museum of science. Visitors of every age ask you questions, "
    "about nature, numbers, history and the everyday. Answer in one or two short sentences. Be "
    "correct before you are complete, and simple before you are clever. Prefer plain words to "
    "technical ones; where a technical word is needed, say what it means. Give one concrete "
    "example where it helps. If a question has a wrong assumption in it, say so kindly and answer "
    "the question that was meant. If you do not know, say that you do not know. Do not repeat the "
    "question, do not greet, and do not end with a question of your own."
)


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One request. with_system: behind the system prompt that all those share.

    cancel_after: tokens after which its client goes away; None = it stays.
    """

    name: str
    question: str
    sampling: SamplingParams
    with_system: bool = True
    cancel_after: int | None = None


@dataclass(slots=True)
class DemoResult:
    """What one request's client saw. texts and usages by sample."""

    request: DemoRequest
    texts: dict[int, str] = field(default_factory=dict[int, str])
    usages: dict[int, GenerationUsage] = field(default_factory=dict[int, GenerationUsage])
    first_token_s: float | None = None
    num_tokens: int = 0
    was_cancelled: bool = False

    def add(self, part: Completion, elapsed_s: float) -> None:
        """Take one message of the stream."""
        for output in part.outputs:
            if output.token_ids and self.first_token_s is None:
                self.first_token_s = elapsed_s
            self.num_tokens += len(output.token_ids)
            self.texts[output.index] = self.texts.get(output.index, "") + output.text
            if output.usage is not None:
                self.usages[output.index] = output.usage


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


FIRST = DemoRequest("first", "What is the capital of France?", _greedy(48))
TOGETHER = (
    DemoRequest("shared 1", "Why is the sky blue?", _greedy(48)),
    DemoRequest("shared 2", "How many legs does a spider have?", _greedy(48)),
    DemoRequest("shared 3", "Who painted the Mona Lisa?", _greedy(48)),
    DemoRequest("shared 4", "What is 2 + 2?", _greedy(48)),
    DemoRequest(
        "n=4",
        "Tell me something surprising about octopuses.",
        SamplingParams(max_tokens=32, temperature=0.7, top_p=0.9, seed=7, n=4),
    ),
    DemoRequest("cancelled", "Tell me the story of the Moon.", _greedy(400), cancel_after=12),
    DemoRequest("alone 1", "Write one sentence about bread.", _greedy(48), with_system=False),
    DemoRequest("alone 2", "Name three colours.", _greedy(48), with_system=False),
)

OnResult = Callable[[DemoResult], None]


async def run_workload(target: str, on_result: OnResult) -> list[DemoResult]:
    """One question alone, so that the system prompt is cached; then all others at once."""
    async with AsyncClient(target) as client:
        results = [await _run(client, FIRST, on_result)]
        return results + await _run_together(client, TOGETHER, on_result)


async def _run_together(
    client: AsyncClient, requests: Sequence[DemoRequest], on_result: OnResult
) -> list[DemoResult]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_run(client, request, on_result)) for request in requests]
    return [task.result() for task in tasks]


async def _run(client: AsyncClient, request: DemoRequest, on_result: OnResult) -> DemoResult:
    result = DemoResult(request)
    messages = [{"role": "user", "content": request.question}]
    if request.with_system:
        messages.insert(0, {"role": "system", "content": SYSTEM_PROMPT})
    began = time.perf_counter()
    # Leaving the block closes the stream, and that cancels the request.
    async with aclosing(client.stream(Chat(messages), request.sampling)) as stream:
        async for part in stream:
            result.add(part, time.perf_counter() - began)
            if request.cancel_after is not None and result.num_tokens >= request.cancel_after:
                result.was_cancelled = True
                break
    on_result(result)
    return result
