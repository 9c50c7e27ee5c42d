"""A running request as its front sees it.

Knows who waits for what; nothing of leases, engines or formats.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine

from ..protos.errors import DeadlineExceeded, PagefleetError, RequestCancelled
from ..protos.messages import SamplingParams
from .generation import OutputDelta
from .model_catalog import ServedModel
from .prepared_call import PreparedCall
from .request_books import RequestBooks


class LiveGeneration:
    """A running request as its front sees it: batches of deltas, then the end or an error.

    Iterate to the end, or `aclose()` it: then its blocks come back. Batches hold all that came
    since the last one, so a slow reader gets fewer and larger ones.
    """

    def __init__(self, prepared: PreparedCall) -> None:
        self.prepared = prepared
        self.books: RequestBooks | None = None
        self._deltas: list[OutputDelta] = []
        self._error: PagefleetError | None = None
        self._wakeup = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._over = asyncio.Event()  # the task is done and the books are closed

    @property
    def request_id(self) -> str:
        """The client's name for it, or the one made for it."""
        return self.prepared.request_id

    @property
    def model(self) -> ServedModel:
        """What it runs on."""
        return self.prepared.model

    @property
    def sampling(self) -> SamplingParams:
        """As it runs: with a seed, and with the grammar of a forced call."""
        return self.prepared.sampling

    @property
    def seed(self) -> int:
        """The client's, or the one drawn for it."""
        assert self.sampling.seed is not None, "an unset seed is drawn before"
        return self.sampling.seed

    def start(self, run: Coroutine[object, object, None]) -> None:
        """Begin; `run` puts the deltas."""
        self._task = asyncio.create_task(run)
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        """Also where it was cancelled before its first step."""
        if self.books is not None:
            self.books.close(cancelled=task.cancelled(), error=self._error)
        self._over.set()
        self._wakeup.set()

    def put(self, deltas: list[OutputDelta]) -> None:
        """Hand on what is new."""
        if self.books is not None:
            self.books.observe(deltas)
        self._deltas.extend(deltas)
        self._wakeup.set()

    def fail(self, error: PagefleetError) -> None:
        """End with an error; what an expired request has and nobody read yet is dropped."""
        if isinstance(error, DeadlineExceeded):
            self._deltas.clear()
        self._error = error

    def cancel(self) -> None:
        """End it as cancelled, from outside; nothing is handed on from here."""
        if self._task is not None and not self._task.done():
            self._deltas.clear()
            self._task.cancel()

    def __aiter__(self) -> AsyncIterator[list[OutputDelta]]:
        return self

    async def __anext__(self) -> list[OutputDelta]:
        assert self._task is not None, "the generation was not started"
        while not self._deltas:
            if self._over.is_set():
                if self._task.cancelled():
                    raise RequestCancelled("the request was cancelled")
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._wakeup.clear()
            await self._wakeup.wait()
        deltas, self._deltas = self._deltas, []
        return deltas

    async def aclose(self) -> None:
        """Stop it if it still runs."""
        self.cancel()
        if self._task is not None:
            await self._over.wait()
