"""Who asks a cluster all the time in a soak, and what each request may end with.

Clients stream to the end, cancel, set deadlines too short, and send what is no request, over gRPC
and HTTP. Knows nothing of what disturbs the cluster meanwhile.
"""

import asyncio
import json
import random
import time
from collections import Counter
from contextlib import suppress

import httpx
from failure_load import Load, Question, make_questions

from pagefleet.cluster.client import AsyncClient
from pagefleet.cluster.serve import RunningCluster
from pagefleet.protos import errors
from pagefleet.protos.messages import SamplingParams

NUM_QUESTIONS = 48
NUM_TOKENS = 60
HANG_S = 150.0
KINDS = {"stream": 40, "http": 20, "cancel": 20, "deadline": 10, "bad": 10}
NO_REQUESTS: list[tuple[object, dict[str, object]]] = [
    ("fine", {"temperature": -1.0}),
    ("fine", {"n": 4096}),
    ("fine", {"max_tokens": 10**7}),
    ("fine", {"stop": ("",)}),
    ("", {}),
    ([10**6], {}),
    ("long " * 1000, {}),
]
NO_BODIES = (b"{", b"[]", b'{"prompt": 1}', b'{"prompt": "x", "n": -1}', b"\xff" * 1000)


class Clients:
    """Their requests, and what became of each. What must not be is in `faults`.

    loses_gateways: connections may break without a word.
    """

    def __init__(
        self,
        cluster: RunningCluster,
        seed: int,
        *,
        has_tls: bool,
        loses_gateways: bool,
    ) -> None:
        self.questions = make_questions(NUM_QUESTIONS, NUM_TOKENS)
        self.expected: list[tuple[object, str]] = []
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []
        self._grpc = cluster.addresses.grpc
        self._http_url = f"{'https' if has_tls else 'http'}://{cluster.addresses.http}"
        self._rng = random.Random(seed)
        self._loses_gateways = loses_gateways

    async def ask_in_peace(self) -> None:
        """Learn what the answers are, before anything happens."""
        loads = [Load([question]) for question in self.questions]
        async with AsyncClient(self._grpc) as client:
            await asyncio.gather(*(self._run_to_end(client, load) for load in loads))
        self.expected = [load.results[0].answer for load in loads]
        self.outcomes.clear()

    async def run(self, number: int, until_s: float) -> None:
        """So many at once, each one request after the other."""
        async with (
            AsyncClient(self._grpc) as client,
            httpx.AsyncClient(base_url=self._http_url, timeout=HANG_S, verify=False) as http,
        ):
            await asyncio.gather(*(self._ask(client, http, until_s) for _ in range(number)))

    async def _ask(self, client: AsyncClient, http: httpx.AsyncClient, until_s: float) -> None:
        while time.monotonic() < until_s:
            (kind,) = self._rng.choices(list(KINDS), list(KINDS.values()))
            index = self._rng.randrange(NUM_QUESTIONS)
            try:
                async with asyncio.timeout(HANG_S):
                    end = await getattr(self, f"_{kind}")(http if kind == "http" else client, index)
            except TimeoutError:
                self._fault(f"{kind}: hung for {HANG_S:g} s")
            except Exception as error:  # the edge: whatever it is, it is told at the end
                self._fault(f"{kind}: {error!r}")
            else:
                self.outcomes[f"{kind}: {end}"] += 1

    def _fault(self, what: str) -> None:
        print(what, flush=True)
        self.faults.append(what)
        self.outcomes["fault"] += 1

    def _check(self, load: Load, index: int, is_whole: bool) -> None:
        tokens, text = load.results[0].answer
        right, right_text = self.expected[index]
        if is_whole:
            assert (tokens, text) == (right, right_text), f"question {index} was answered otherwise"
        assert tokens == right[: len(tokens)], f"question {index} began otherwise"

    async def _run_to_end(self, client: AsyncClient, load: Load) -> None:
        """As a good client does: it comes again when it is told to, or finds nobody there."""
        retry_token = ""
        while True:
            try:
                await load.run_one(client, 0, retry_token=retry_token)
            except (errors.Overloaded, errors.Unavailable) as error:
                retry_after_s = error.retry_after_s
                if retry_after_s is None and self._loses_gateways:
                    retry_after_s = 1.0
                assert retry_after_s is not None, f"a retry would help, and it is not told: {error}"
                self.outcomes[f"came again: {type(error).__name__}"] += 1
                retry_token = error.retry_token
                await asyncio.sleep(retry_after_s)
            else:
                return

    async def _stream(self, client: AsyncClient, index: int) -> str:
        load = Load([self.questions[index]])
        await self._run_to_end(client, load)
        self._check(load, index, is_whole=True)
        return "exact, resumed" if load.results[0].resumes else "exact"

    async def _cancel(self, client: AsyncClient, index: int) -> str:
        load = Load([self.questions[index]])
        running = asyncio.ensure_future(self._run_to_end(client, load))
        await asyncio.wait({running}, timeout=self._rng.uniform(0.0, 1.0))
        is_cancelled = running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        self._check(load, index, is_whole=not is_cancelled)
        return "cancelled" if is_cancelled else "too late"

    async def _deadline(self, client: AsyncClient, index: int) -> str:
        question = self.questions[index]
        timeout_s = self._rng.uniform(0.02, 0.5)
        try:
            await client.generate(question.prompt, question.sampling, timeout_s=timeout_s)
        except (errors.DeadlineExceeded, errors.Overloaded, errors.Unavailable) as error:
            return type(error).__name__
        return "in time"

    async def _bad(self, client: AsyncClient, index: int) -> str:
        prompt, changes = NO_REQUESTS[index % len(NO_REQUESTS)]
        try:
            await client.generate(prompt, SamplingParams(**({"max_tokens": 4} | changes)))
        except (errors.InvalidArgument, errors.Unavailable) as error:
            return type(error).__name__
        raise AssertionError(f"{prompt!r}, {changes} was taken for a request")

    async def _http(self, http: httpx.AsyncClient, index: int) -> str:
        try:
            return await self._post(http, index)
        except httpx.TransportError as error:
            assert self._loses_gateways, f"{error!r}, and the gateway lives"
            await asyncio.sleep(1.0)
            return "connection lost"

    async def _post(self, http: httpx.AsyncClient, index: int) -> str:
        if index % 4 == 3:
            reply = await http.post(
                "/v1/completions", content=NO_BODIES[index // 4 % len(NO_BODIES)]
            )
            assert reply.status_code == 400, reply.text
            return "refused"
        text = ""
        body = _body(self.questions[index])
        async with http.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code in (429, 503):
                return f"{reply.status_code}"
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        assert event["error"]["code"] == "unavailable", event
                        return "ended as unavailable"
                    text += "".join(choice["text"] for choice in event["choices"])
        assert text == self.expected[index][1], f"question {index} was answered otherwise"
        return "exact"


def _body(question: Question) -> dict[str, object]:
    sampling = question.sampling
    return {
        "model": "tiny",
        "prompt": question.prompt,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "ignore_eos": True,
        "stream": True,
    }
