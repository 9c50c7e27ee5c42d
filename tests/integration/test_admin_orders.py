"""Orders of an operator to a real cluster under load: forget what is cached, have other weights."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from failure_load import Load, Question, make_questions, run_through
from tiny_model import make_tiny_model

from pagefleet.cluster.client import AsyncClient, Client
from pagefleet.cluster.llm import LLM
from pagefleet.protos.messages import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(420)]

WAIT_S = 150.0
PROMPT = "A prompt that is long enough to fill some blocks of sixteen tokens each. " * 4
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("newer") / "newer", scale=1.7)


@pytest.fixture
def restored_weights(client: Client, tiny_model: Path, settled_state) -> Iterator[None]:
    """Afterwards the cluster's own again, for all other tests."""
    yield
    version = client.update_weights(str(tiny_model), drain_s=5.0)
    wait_version(client, version)
    settled_state()


def wait_version(client: Client, version: int) -> None:
    """Until both replicas have it."""
    deadline = time.monotonic() + WAIT_S
    while True:
        replicas = client.cluster_state().replicas
        versions = [r.weights_version for r in replicas if r.state == "ready"]
        if versions == [version, version]:
            return
        assert time.monotonic() < deadline, f"{replicas} do not have version {version}"
        time.sleep(0.05)  # between two looks at another process


def cached_tokens(client: Client, prompt: str) -> int:
    """Of the prompt, wherever it is sent."""
    usage = client.generate(prompt, GREEDY).outputs[0].usage
    assert usage is not None
    return usage.cached_tokens


def test_e12_nothing_cached_is_found_after_a_reset_and_streams_go_on(
    client: Client, settled_state: Callable[[], object]
):
    long = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    undisturbed = client.generate(PROMPT, long).outputs[0].token_ids
    settled_state()
    assert cached_tokens(client, PROMPT) > 0
    epochs = {r.replica_id: r.epoch for r in client.reset_prefix_cache().replicas}
    assert len(epochs) == 2
    assert cached_tokens(client, PROMPT) == 0
    tokens: list[int] = []
    for part in client.stream(PROMPT, long):
        if not tokens:
            done = client.reset_prefix_cache("tiny").replicas
            assert {r.replica_id: r.epoch - 1 for r in done} == epochs
            assert any(r.num_blocks for r in done)
        tokens += [token for output in part.outputs for token in output.token_ids]
    assert tuple(tokens) == tuple(undisturbed)
    settled_state()


async def test_new_weights_come_in_under_load_and_no_stream_mixes_them(
    cluster, client: Client, newer: Path, settled_state, restored_weights
):
    questions = make_questions(16, num_tokens=300)
    old = [result.answer for result in await Load(questions).run_on(cluster.addresses.grpc)]
    assert await asyncio.to_thread(cached_tokens, client, PROMPT) >= 0
    version = 0

    async def update() -> None:
        nonlocal version
        version = await asyncio.to_thread(client.update_weights, str(newer))

    results = await run_through(cluster.addresses.grpc, questions, update, after_tokens=400)
    assert [result.answer for result in results] == old, "what had begun ends as it began"
    await asyncio.to_thread(wait_version, client, version)
    with LLM(str(newer), num_blocks=256, deterministic=True, num_threads=1) as llm:
        (alone,) = llm.generate([PROMPT], GREEDY)
    (output,) = (await asyncio.to_thread(client.generate, PROMPT, GREEDY)).outputs
    assert output.token_ids == alone.token_ids
    assert output.usage is not None and output.usage.cached_tokens == 0
    await asyncio.to_thread(settled_state)


async def test_who_waits_while_weights_change_is_answered(
    cluster, client: Client, newer: Path, settled_state, restored_weights
):
    """Requests that come while a replica is away go to the other, or wait for either."""
    version = await asyncio.to_thread(client.update_weights, str(newer), "", 0.0)
    question = Question("Asked in between", GREEDY)
    async with AsyncClient(cluster.addresses.grpc) as asking:
        waiting = asyncio.create_task(asyncio.to_thread(wait_version, client, version))
        while not waiting.done():
            await Load([question]).run(asking)
        await waiting
