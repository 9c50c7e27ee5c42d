"""The application on a real Ray Serve: its size follows the load, streams outlive its changes.

One application for all tests, with two models of other weights, deployed as `serve deploy` does it.
"""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from failure_load import STREAM_TIMEOUT_S
from tiny_model import make_tiny_model

from pagefleet.cluster.client import AsyncClient, Client
from pagefleet.cluster.grammar import json_schema
from pagefleet.cluster.llm import LLM
from pagefleet.protos.errors import Unavailable
from pagefleet.protos.messages import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(420)]

WAIT_S = 150.0
GREEDY = SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)  # 58 blocks
PROMPTS = [f"Question {number} of the load" for number in range(12)]
SHORT = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
LETTERS = json_schema(
    {
        "type": "object",
        "properties": {"letters": {"type": "string", "pattern": "^[a-z]{150}$"}},
        "required": ["letters"],
        "additionalProperties": False,
    }
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@dataclass
class Fleet:
    """The application as an operator and a client see it."""

    args: dict[str, object]
    address: str = field(init=False)

    def __post_init__(self) -> None:
        self.address = f"127.0.0.1:{self.args['grpc_port']}"

    def deploy(self, **changes: object) -> None:
        """Returns at once, as `serve deploy` does."""
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        self.args |= changes
        application = {
            "name": "fleet",
            "route_prefix": "/",
            "import_path": "pagefleet.cluster.serve_app:app",
            "args": self.args,
        }
        schema = ServeDeploySchema.model_validate({"applications": [application]})
        _get_global_client().deploy_apps(schema)

    def replicas(self, model: str = "tiny", state: str = "ready") -> list[str]:
        """Their ids, as the controller knows them; none while no gateway listens."""
        try:
            with Client(self.address) as client:
                replicas = client.cluster_state().replicas
        except Unavailable:
            return []
        return [r.replica_id for r in replicas if r.model == model and r.state == state]

    async def wait_replicas(self, number: int, model: str = "tiny") -> list[str]:
        deadline = time.monotonic() + WAIT_S
        while len(ids := await asyncio.to_thread(self.replicas, model)) != number:
            assert time.monotonic() < deadline, f"{ids} are ready, not {number}"
            await asyncio.sleep(0.1)  # between two looks at another process
        return ids


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders: the model, the weights that replace its own, and another model."""
    root = tmp_path_factory.mktemp("models")
    scales = {"tiny": 2.0, "newer": 1.7, "other": 1.5}
    return {name: make_tiny_model(root / name, scale) for name, scale in scales.items()}


def answers_of(folder: Path, sampling: SamplingParams, prompts: list[str]) -> list[tuple[int, ...]]:
    with LLM(str(folder), num_blocks=1024, deterministic=True, num_threads=1) as llm:
        return [tuple(output.token_ids) for output in llm.generate(prompts, sampling)]


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, dict[str, tuple[int, ...]]]:
    """What an undisturbed engine says, by weights and prompt."""
    return {
        name: dict(zip(PROMPTS, answers_of(models[name], GREEDY, PROMPTS), strict=True))
        for name in ("tiny", "newer")
    }


@pytest.fixture(scope="module")
def fleet(ray_cluster: None, models: dict[str, Path]) -> Iterator[Fleet]:
    from ray import serve

    common = {"num_cpus": 0.1, "max_model_len": 1024, "deterministic": True, "startup_s": 1}
    quick = {"upscale_delay_s": 0.2, "downscale_delay_s": 2, "downscale_to_zero_delay_s": 2}
    tiny = {"model": str(models["tiny"]), "served_model_name": "tiny", "num_blocks": 256}
    other = {"model": str(models["other"]), "served_model_name": "other", "num_blocks": 64}
    serve.start(proxy_location="Disabled")
    fleet = Fleet(
        {
            **tiny,
            **common,
            **quick,
            "max_replicas": 2,
            "grpc_port": free_port(),
            "http_port": free_port(),
            "drain_s": 0.5,
            "max_stream_s": 120,
            "more_models": [{**other, **common, **quick, "min_replicas": 0}],
        }
    )
    fleet.deploy()
    asyncio.run(fleet.wait_replicas(1))
    yield fleet
    serve.shutdown()


class ClosedLoop:
    """Clients that ask one question after the other, and keep every answer that they get whole.

    A stream that has begun must not fail; who cannot begin comes again.
    """

    def __init__(self, address: str, prompts: list[str]) -> None:
        self._address = address
        self._prompts = prompts
        self._is_over = asyncio.Event()
        self.answers: list[tuple[str, tuple[int, ...]]] = []
        self.num_resumes = 0

    async def run_while(self, work: Callable[[], Awaitable[object]]) -> None:
        """Until `work` is done; the questions that are open then are still answered."""
        async with AsyncClient(self._address) as client, asyncio.TaskGroup() as tasks:
            for prompt in self._prompts:
                tasks.create_task(self._ask_on(client, prompt))
            await work()
            self._is_over.set()

    async def _ask_on(self, client: AsyncClient, prompt: str) -> None:
        while not self._is_over.is_set():
            tokens: list[int] = []
            try:
                async with (
                    asyncio.timeout(STREAM_TIMEOUT_S),
                    aclosing(client.stream(prompt, GREEDY, model="tiny")) as parts,
                ):
                    async for part in parts:
                        for output in part.outputs:
                            tokens += output.token_ids
                            self.num_resumes += output.usage.resumes if output.usage else 0
            except Unavailable as error:
                assert not tokens, f"a stream was lost after {len(tokens)} tokens: {error}"
                await asyncio.sleep(0.2)
                continue
            self.answers.append((prompt, tuple(tokens)))


async def test_load_raises_replicas_from_one_to_two_and_back_and_no_stream_notices(
    fleet: Fleet, expected
):
    load = ClosedLoop(fleet.address, PROMPTS)
    await load.run_while(lambda: fleet.wait_replicas(2))
    few = ClosedLoop(fleet.address, PROMPTS[:2])  # C21: one goes while streams are running
    await few.run_while(lambda: fleet.wait_replicas(1))
    answers = [*load.answers, *few.answers]
    assert len(answers) >= len(PROMPTS)
    assert all(tokens == expected["tiny"][prompt] for prompt, tokens in answers)


def leader_pid(replica_id: str) -> int:
    """Of the process that listens at the replica's address."""
    import ray

    controller = ray.get_actor("controller-fleet", namespace="pagefleet")
    state = ray.get(controller.cluster_state.remote(), timeout=WAIT_S)
    (address,) = [r.address for r in state.replicas if r.replica_id == replica_id]
    port = int(address.rpartition(":")[2])
    (pid,) = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }
    return pid


async def test_c18_a_grammar_goes_on_where_its_worker_died(fleet: Fleet):
    """The only replica: its ranks are rebuilt in their place, and the request waits for them."""
    (replica_id,) = await fleet.wait_replicas(1)
    sampling = SamplingParams(max_tokens=800, temperature=1.0, seed=5, grammar=LETTERS)
    async with AsyncClient(fleet.address) as client:
        undisturbed = (await client.generate("Letters:", sampling, model="tiny")).outputs[0]
        assert len(json.loads(undisturbed.text)["letters"]) == 150
        text, resumes, killed = "", 0, False
        async with aclosing(client.stream("Letters:", sampling, model="tiny")) as parts:
            async for part in parts:
                for output in part.outputs:
                    text += output.text
                    resumes = output.usage.resumes if output.usage else resumes
                if len(text) > 20 and not killed:
                    killed = True
                    pid = await asyncio.to_thread(leader_pid, replica_id)
                    os.kill(pid, signal.SIGKILL)
    assert text == undisturbed.text
    assert resumes >= 1
    assert await fleet.wait_replicas(1) == [replica_id], "Serve did not replace it"


async def test_a_request_starts_the_first_replica_and_is_answered_by_it(
    fleet: Fleet, models: dict[str, Path]
):
    """C28 too: the same prompts to two models, and each answers as it would alone."""
    assert await asyncio.to_thread(fleet.replicas, "other") == []
    alone = {
        name: await asyncio.to_thread(answers_of, models[name], SHORT, PROMPTS[:2])
        for name in ("other", "tiny")
    }
    async with AsyncClient(fleet.address) as client:
        held = [client.generate(prompt, SHORT, model="other") for prompt in PROMPTS[:2]]
        answered = await asyncio.gather(*held)
        there = [await client.generate(prompt, SHORT, model="tiny") for prompt in PROMPTS[:2]]
    answers = [tuple(answer.outputs[0].token_ids) for answer in answered]
    assert answers == alone["other"]
    assert [tuple(answer.outputs[0].token_ids) for answer in there] == alone["tiny"]
    await fleet.wait_replicas(0, "other")


async def test_new_weights_roll_in_under_load_and_no_stream_mixes_them(
    fleet: Fleet, models: dict[str, Path], expected
):
    """Gateway and replica are both replaced while four clients ask without a pause."""
    (before,) = await fleet.wait_replicas(1)

    async def update() -> None:
        fleet.deploy(model=str(models["newer"]), weights_version=1)
        deadline = time.monotonic() + WAIT_S
        while load.answers[-1:] == [] or load.answers[-1][1] not in newer:
            assert time.monotonic() < deadline, "nobody is answered with the new weights"
            await asyncio.sleep(0.1)  # between two looks at what clients got

    newer = set(expected["newer"].values())
    load = ClosedLoop(fleet.address, PROMPTS[:4])
    await load.run_while(update)
    for prompt, tokens in load.answers:
        assert tokens in (expected["tiny"][prompt], expected["newer"][prompt])
    assert {tokens in newer for _, tokens in load.answers} == {True, False}
    (after,) = await fleet.wait_replicas(1)
    assert after != before


async def test_ordered_weights_come_in_where_the_replica_is(
    fleet: Fleet, models: dict[str, Path], expected
):
    """The only one: who asks meanwhile waits for it, and Serve has nothing to do."""
    (before,) = await fleet.wait_replicas(1)
    async with AsyncClient(fleet.address) as client:
        version = await client.update_weights(str(models["tiny"]), "tiny")
        assert version > 1
        deadline = time.monotonic() + WAIT_S
        tokens: tuple[int, ...] = ()
        while tokens != expected["tiny"][PROMPTS[0]]:
            assert time.monotonic() < deadline, "nobody is answered with the ordered weights"
            (output,) = (await client.generate(PROMPTS[0], GREEDY, model="tiny")).outputs
            tokens = tuple(output.token_ids)
            assert tokens in (expected["tiny"][PROMPTS[0]], expected["newer"][PROMPTS[0]])
    assert await fleet.wait_replicas(1) == [before]
