"""The HTTP front of a fake cluster over a live uvicorn, and clients of it: httpx and `openai`."""

import json
from functools import cached_property
from pathlib import Path

import httpx
import openai
from gateway_fakes import FakeCluster, make_tokenizer

from pagefleet.cluster.http_server import HttpServer
from pagefleet.cluster.openai_api import make_app


class HttpFront(FakeCluster):
    """A fake cluster with a real HTTP server. template: its model's, if a test needs its own."""

    def __init__(self, template: str | None = None) -> None:
        def load(_: Path):
            return make_tokenizer(template=template)

        super().__init__()
        if template is not None:
            self.gateway._models._load_tokenizer = load

    async def __aenter__(self) -> "HttpFront":
        await super().__aenter__()
        self.server = HttpServer(make_app(self.gateway))
        port = await self.server.start("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{port}"
        unlimited = httpx.Limits(max_connections=None)
        # verify: without it, each test would load every certificate authority
        self.http = httpx.AsyncClient(base_url=self.url, timeout=10, limits=unlimited, verify=False)
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.http.aclose()
        await self.server.stop(0)
        await super().__aexit__(*failure)

    @cached_property
    def openai(self) -> openai.AsyncOpenAI:
        """Tries everything once."""
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=self.http
        )

    async def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        return await self.http.post(path, json=body, headers=headers)

    async def events(self, path: str, body: dict[str, object]) -> list[object]:
        """The events of a stream, [DONE] included."""
        found: list[object] = []
        async with self.http.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            async for line in response.aiter_lines():
                if line:
                    data = line.removeprefix("data: ")
                    found.append(data if data == "[DONE]" else json.loads(data))
        return found

    def sent(self) -> tuple[str, str]:
        """Prompt text and grammar of the last request that reached an engine."""
        request = [r for leader in self.leaders for r in leader.engine.submitted][-1]
        text = make_tokenizer().decode(request.prompt_token_ids, skip_special_tokens=False)
        return text, request.sampling.grammar
