"""64 streams at once, and what must be true of them whatever happens to the cluster meanwhile."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from pagefleet.cluster.client import AsyncClient, RequestOptions
from pagefleet.protos.errors import Unavailable
from pagefleet.protos.messages import FinishReason, SamplingParams

NUM_STREAMS = 64
NUM_TOKENS = 100
STREAM_TIMEOUT_S = 150.0  # a stream that is still silent then hangs


@dataclass
class StreamResult:
    """What one client got."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    resumes: int = 0
    replica: str = ""
    longest_gap_s: float = 0.0

    @property
    def answer(self) -> tuple[tuple[int, ...], str]:
        """What has to be the same in every run."""
        return tuple(self.token_ids), self.text


@dataclass(frozen=True)
class Question:
    """One request: half are greedy, half seeded; some share a beginning, some have two stops."""

    prompt: str
    sampling: SamplingParams


def make_questions(number: int = NUM_STREAMS, num_tokens: int = NUM_TOKENS) -> list[Question]:
    """Different ones, the same each time."""
    return [
        Question(
            f"{'A shared beginning of some blocks. ' if i % 4 == 0 else ''}Question {i}",
            SamplingParams(
                max_tokens=num_tokens, temperature=float(i % 2), seed=i, ignore_eos=True
            ),
        )
        for i in range(number)
    ]


class Load:
    """Runs questions at once and counts the tokens as they come."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self.questions = questions
        self.results = [StreamResult() for _ in questions]
        self._arrived = asyncio.Event()

    @property
    def num_tokens(self) -> int:
        """Over all streams."""
        return sum(len(result.token_ids) for result in self.results)

    async def wait_tokens(self, number: int) -> None:
        """Until so many have come."""
        while self.num_tokens < number:
            self._arrived.clear()
            await self._arrived.wait()

    async def run(self, client: AsyncClient, model: str = "") -> list[StreamResult]:
        """All streams to their ends."""
        streams = (self.run_to_end(client, index, model) for index in range(len(self.questions)))
        await asyncio.gather(*streams)
        return self.results

    async def run_on(self, address: str, model: str = "") -> list[StreamResult]:
        """The same, over a connection of its own."""
        async with AsyncClient(address) as client:
            return await self.run(client, model)

    async def run_to_end(self, client: AsyncClient, index: int, model: str = "") -> None:
        """One stream, as a good client runs it: if it ends with a hint, it goes on after that.

        On a starved machine the watchdog may take the last replica for dead too.
        """
        while True:
            try:
                await self.run_one(client, index, model)
            except Unavailable as error:
                assert error.retry_after_s is not None, "a retry would help, and it is not told"
                await asyncio.sleep(error.retry_after_s)
            else:
                return

    async def run_one(
        self, client: AsyncClient, index: int, model: str = "", retry_token: str = ""
    ) -> None:
        """One stream; goes on behind what its result has already."""
        question, result = self.questions[index], self.results[index]
        resumed = tuple(result.token_ids)
        options = RequestOptions(resume_token_ids=resumed, retry_token=retry_token)
        parts = client.stream(question.prompt, question.sampling, model=model, options=options)
        last = time.monotonic()
        async with asyncio.timeout(STREAM_TIMEOUT_S), aclosing(parts):
            async for part in parts:
                now = time.monotonic()
                result.longest_gap_s = max(result.longest_gap_s, now - last)
                last = now
                for output in part.outputs:
                    result.token_ids += output.token_ids
                    result.text += output.text
                    result.finish_reason = output.finish_reason or result.finish_reason
                    if output.usage is not None:
                        result.resumes = output.usage.resumes
                        result.replica = output.usage.replica
                self._arrived.set()


async def run_through(
    address: str,
    questions: Sequence[Question],
    disturb: Callable[[], Awaitable[None]],
    after_tokens: int,
) -> list[StreamResult]:
    """Run the questions, and `disturb` once so many tokens have come over all streams."""
    load = Load(questions)
    async with AsyncClient(address) as client, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(load.run(client))
        await load.wait_tokens(after_tokens)
        await disturb()
        assert not running.done(), "the disturbance came too late"
    return load.results
