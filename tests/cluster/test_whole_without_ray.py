"""Controller, two leaders with real engines, and a gateway in one process: everything but Ray."""

import asyncio
import random

import pytest
from tiny_model import make_tiny_model

from pagefleet.cluster.controller import ControllerConfig
from pagefleet.cluster.controller_actor import ControllerService
from pagefleet.cluster.gateway import Gateway
from pagefleet.cluster.generation import GenerateCall, TextPrompt, merge_deltas
from pagefleet.protos import errors
from pagefleet.protos.messages import ReplicaState, SamplingParams
from pagefleet.workers.config import WorkerConfig
from pagefleet.workers.leader import Leader
from pagefleet.workers.loaded_engine import load_engine

NUM_BLOCKS = 96


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


class Whole:
    """The parts, and how to see that nothing is left over."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.controller = ControllerService(ControllerConfig(), rng=random.Random(1))
        self.gateway = Gateway("gw", self.controller)
        self.leaders: list[Leader] = []

    async def __aenter__(self) -> "Whole":
        self.ticking = asyncio.create_task(self.controller.run())
        for number in range(2):
            await self.add_leader(f"r{number}")
        await self.gateway.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.gateway.close()
        for leader in self.leaders:
            await asyncio.to_thread(leader.close)
        self.ticking.cancel()

    async def add_leader(self, replica_id: str) -> None:
        def start() -> Leader:
            config = WorkerConfig(
                model=str(self.folder),
                device="cpu",
                num_blocks=NUM_BLOCKS,
                max_context=512,
                deterministic=True,
                num_threads=1,
            )
            loaded = load_engine(config)
            return Leader(replica_id, "tiny", loaded, self.controller, host="127.0.0.1")

        self.leaders.append(await asyncio.to_thread(start))

    async def run(self, call: GenerateCall):
        generation = await self.gateway.generate(call)
        return merge_deltas([delta async for batch in generation for delta in batch])

    async def settle(self) -> None:
        """Wait until every block is clean or cached-idle; fails by the test's timeout."""
        while True:
            state = await self.controller.cluster_state()
            ready = [replica for replica in state.replicas if replica.state is ReplicaState.READY]
            in_use = sum(
                replica.device.referenced
                + replica.device.fenced
                + replica.leased_blocks
                + replica.num_running
                + replica.num_waiting
                for replica in ready
            )
            if ready and not in_use and not state.queued_requests:
                return
            await asyncio.sleep(0.02)

    async def check_nothing_left(self) -> None:
        await self.settle()
        await self.controller.check_integrity()
        assert self.gateway._running == {}
        assert self.gateway._reservations.num_waiting == 0
        for link in self.gateway._engines._links.values():
            assert link._streams == {}


@pytest.fixture
async def whole(tiny_model):
    async with Whole(tiny_model) as made:
        yield made


def call(number: int, **sampling: object) -> GenerateCall:
    sampling = {"max_tokens": 60, "seed": number, "ignore_eos": True} | sampling
    prompt = TextPrompt("a system prompt of two blocks, shared: " + str(number))
    return GenerateCall(prompt, sampling=SamplingParams(**sampling))


@pytest.mark.timeout(120)
async def test_streams_survive_a_replica_unchanged(whole):
    """Greedy and seeded, one and two samples: every client gets exactly its tokens."""
    calls = [call(i, n=1 + i % 2, temperature=float(i % 3 > 0)) for i in range(12)]
    expected = [[output.token_ids for output in await whole.run(c)] for c in calls]
    generations = [await whole.gateway.generate(c) for c in calls]
    first = [await anext(generation) for generation in generations]
    busiest = max(whole.leaders, key=lambda leader: leader.stats().num_running)
    await asyncio.to_thread(busiest.close)
    for generation, batch, tokens in zip(generations, first, expected, strict=True):
        rest = [delta async for later in generation for delta in later]
        outputs = merge_deltas(batch + rest)
        assert [output.token_ids for output in outputs] == tokens
    whole.leaders.remove(busiest)
    assert whole.gateway.num_running == 0


@pytest.mark.timeout(120)
async def test_a_beam_search_begins_again_when_its_replica_is_lost(whole):
    beams = call(1, beam_width=4, n=3, temperature=0.0)
    expected = await whole.run(beams)
    generation = await whole.gateway.generate(beams)
    while not any(leader.stats().num_running for leader in whole.leaders):
        await asyncio.sleep(0)
    busiest = max(whole.leaders, key=lambda leader: leader.stats().num_running)
    await asyncio.to_thread(busiest.close)
    outputs = merge_deltas([delta async for batch in generation for delta in batch])
    assert [output.token_ids for output in outputs] == [o.token_ids for o in expected]
    assert [output.score for output in outputs] == [o.score for o in expected]
    assert [output.usage.resumes for output in outputs] == [1, 1, 1]
    whole.leaders.remove(busiest)


@pytest.mark.timeout(120)
async def test_random_cancels_leave_every_block_free(whole):
    rng = random.Random(14)

    async def one(number: int) -> None:
        generation = await whole.gateway.generate(call(number, n=rng.choice((1, 1, 4))))
        for _ in range(rng.randrange(4)):
            await anext(generation, None)
        await generation.aclose()

    for _ in range(5):
        await asyncio.gather(*(one(number) for number in range(40)))
    await whole.check_nothing_left()
    assert len(await whole.run(call(1))) == 1


@pytest.mark.timeout(120)
async def test_deadlines_in_the_queue_and_while_running(whole):
    async def one(number: int) -> str:
        hurried = GenerateCall(
            TextPrompt(f"request {number}"),
            sampling=SamplingParams(max_tokens=400, ignore_eos=True, seed=0),
            deadline_s=0.05 if number % 2 else None,
        )
        try:
            await whole.run(hurried)
        except errors.DeadlineExceeded:
            return "late"
        return "done"

    outcomes = await asyncio.gather(*(one(number) for number in range(12)))
    assert outcomes[::2] == ["done"] * 6, "those without a deadline are not touched by the others"
    assert "late" in outcomes
    await whole.check_nothing_left()


async def test_stop_strings_and_hits(whole):
    (plain,) = await whole.run(call(3, temperature=0.0))
    stop = plain.text[20:24]
    (stopped,) = await whole.run(call(3, temperature=0.0, stop=(stop,)))
    assert stopped.text == plain.text[: plain.text.index(stop)]
    assert stopped.usage.completion_tokens <= 24 * 4
    assert stopped.usage.cached_tokens in (0, 32), "two blocks, if it went to the same replica"
    await whole.check_nothing_left()


async def test_what_can_never_fit_is_refused_and_harms_nobody(whole):
    with pytest.raises(errors.InvalidArgument, match="blocks"):
        await whole.run(call(0, n=128, max_tokens=400))
    assert len(await whole.run(call(1, max_tokens=3))) == 1
