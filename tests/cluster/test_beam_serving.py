"""Beam search from a client to a real engine, over gRPC and HTTP; and what refuses it."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tiny_model import make_tiny_model

from pagefleet.cluster.client import AsyncClient
from pagefleet.cluster.client_messages import RequestOptions
from pagefleet.cluster.controller import ControllerConfig
from pagefleet.cluster.controller_actor import ControllerService
from pagefleet.cluster.gateway import Gateway
from pagefleet.cluster.grpc_server import GrpcServer
from pagefleet.cluster.http_server import HttpServer
from pagefleet.cluster.llm import LLM, CompletionOutput
from pagefleet.cluster.openai_api import make_app
from pagefleet.protos.errors import InvalidArgument
from pagefleet.protos.messages import AdmissionClass, SamplingParams
from pagefleet.workers.config import WorkerConfig
from pagefleet.workers.leader import Leader
from pagefleet.workers.loaded_engine import load_engine

PROMPT = "Once upon a time, long enough for some blocks."
BEAMS = SamplingParams(beam_width=4, n=3, max_tokens=12, length_penalty=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[CompletionOutput, ...]:
    """Of the same model in this process."""
    with LLM(str(folder), num_blocks=64, num_threads=1, deterministic=True) as llm:
        (completion,) = llm.generate([PROMPT], BEAMS)
    return completion.outputs


@dataclass
class Front:
    """Both protocols of one replica."""

    gateway: Gateway
    leader: Leader
    client: AsyncClient
    http: httpx.AsyncClient


@pytest.fixture
async def front(folder: Path) -> AsyncIterator[Front]:
    controller = ControllerService(ControllerConfig(), rng=random.Random(1))
    ticking = asyncio.create_task(controller.run())
    config = WorkerConfig(str(folder), device="cpu", num_blocks=64, num_threads=1)
    leader = await asyncio.to_thread(
        lambda: Leader("r0", "tiny", load_engine(config), controller, host="127.0.0.1")
    )
    gateway = Gateway("gw", controller)
    await gateway.start()
    grpc_server, http_server = GrpcServer(gateway), HttpServer(make_app(gateway))
    grpc_port = await grpc_server.start("127.0.0.1", 0)
    http_port = await http_server.start("127.0.0.1", 0)
    async with (
        AsyncClient(f"127.0.0.1:{grpc_port}") as client,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{http_port}", timeout=30, verify=False
        ) as http,
    ):
        yield Front(gateway, leader, client, http)
    await http_server.stop(0)
    await grpc_server.stop(0)
    await gateway.close()
    await asyncio.to_thread(leader.close)
    ticking.cancel()


def test_scores_fall_and_fit_their_beams(expected: tuple[CompletionOutput, ...]) -> None:
    assert [output.index for output in expected] == [0, 1, 2]
    scores = [output.score for output in expected]
    assert scores == sorted(scores, reverse=True)
    assert len({output.token_ids for output in expected}) == 3


@pytest.mark.parametrize("admission", list(AdmissionClass))
async def test_over_grpc(
    front: Front, expected: tuple[CompletionOutput, ...], admission: AdmissionClass
) -> None:
    completion = await front.client.generate(
        PROMPT, BEAMS, options=RequestOptions(admission_class=admission)
    )
    assert [o.token_ids for o in completion.outputs] == [o.token_ids for o in expected]
    assert [o.text for o in completion.outputs] == [o.text for o in expected]
    scores = [o.score for o in expected]
    assert [o.score for o in completion.outputs] == pytest.approx(scores, abs=1e-4)
    assert all(o.finish_reason and o.usage for o in completion.outputs)


async def test_a_stream_of_beams_is_refused(front: Front) -> None:
    with pytest.raises(InvalidArgument, match="beam_width"):
        async for _ in front.client.stream(PROMPT, BEAMS):
            pass
    with pytest.raises(InvalidArgument, match="temperature"):
        await front.client.generate(PROMPT, SamplingParams(beam_width=2, temperature=0.5))


async def test_over_http_as_vllm_has_it(front: Front, folder: Path) -> None:
    with LLM(str(folder), num_blocks=64, num_threads=1) as llm:
        beams = SamplingParams(beam_width=3, n=3, max_tokens=8, length_penalty=2.0)
        (expected,) = llm.generate([PROMPT], beams)
    body = {"prompt": PROMPT, "use_beam_search": True, "n": 3, "max_tokens": 8}
    answer = await front.http.post("/v1/completions", json=body | {"length_penalty": 2.0})
    choices = answer.json()["choices"]
    assert [choice["text"] for choice in choices] == [o.text for o in expected.outputs]


async def test_a_single_beam_is_greedy(front: Front) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8}
    answers = [
        await front.http.post("/v1/completions", json=body | fields)
        for fields in ({"use_beam_search": True}, {"temperature": 0})
    ]
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"stream": True}, "stream"), ({"n": 20}, "n"), ({"n": 2, "temperature": 0.5}, "temperature")],
)
async def test_refused_over_http(front: Front, fields: dict[str, object], param: str) -> None:
    body = {"prompt": PROMPT, "use_beam_search": True} | fields
    answer = await front.http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
