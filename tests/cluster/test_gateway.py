"""The gateway over real sockets: every way a request can end, fail over, or be taken back."""

import asyncio
from dataclasses import replace

import pytest
from gateway_fakes import (
    MAX_CONTEXT,
    TOKENIZER,
    FakeCluster,
    collect,
    ids_of,
    make_card,
    until,
)

from pagefleet.cluster.gateway_spec import OnDemand
from pagefleet.cluster.generation import (
    ChatPrompt,
    GenerateCall,
    TextPrompt,
    TokenPrompt,
    merge_deltas,
)
from pagefleet.protos import errors
from pagefleet.protos.messages import FinishReason, Refused, SamplingParams


@pytest.fixture
async def cluster():
    async with FakeCluster() as made:
        yield made


def call(prompt: str = "hello", **sampling: object) -> GenerateCall:
    sampling = {"max_tokens": 100, "seed": 7} | sampling
    return GenerateCall(TextPrompt(prompt), sampling=SamplingParams(**sampling))


# -- the plain way ---------------------------------------------------------------------------


async def test_text_comes_with_usage_and_a_reason(cluster):
    cluster.say("Grüße 🙂!")
    cluster.engine.cached_tokens = 3
    (output,) = await cluster.run(call("hello"))
    assert output.text == "Grüße 🙂!"
    assert output.token_ids == (*ids_of("Grüße 🙂!"), 257)
    assert output.finish_reason is FinishReason.STOP
    usage = output.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (6, 3, 14)
    assert (usage.replica, usage.resumes, usage.queued_s, usage.decode_s) == ("r0", 0, 0.25, 1.0)
    assert 0 <= usage.admission_s <= usage.first_token_s <= usage.total_s


async def test_what_is_reserved_and_submitted(cluster):
    prompt = "x" * 40
    await cluster.run(call(prompt, max_tokens=5, n=2))
    (reserved,) = cluster.controller.reserved
    assert (reserved.num_tokens, reserved.num_samples, reserved.max_tokens) == (41, 2, 5)
    assert len(reserved.route_hashes) == 2, "two full blocks of 16"
    (submitted,) = cluster.engine.submitted
    assert submitted.prompt_token_ids == (256, *ids_of(prompt))
    assert [sample.index for sample in submitted.samples] == [0, 1]
    assert submitted.lease_blocks == 8
    assert not cluster.controller.released


async def test_samples_differ_and_a_seed_repeats_them(cluster):
    first = await cluster.run(call(n=4, max_tokens=20, temperature=1.0))
    again = await cluster.run(call(n=4, max_tokens=20, temperature=1.0))
    assert [output.token_ids for output in first] == [output.token_ids for output in again]
    assert len({output.token_ids for output in first}) >= 2


async def test_an_unset_seed_is_drawn_once_and_told(cluster):
    generation = await cluster.gateway.generate(call(seed=None, max_tokens=3))
    await collect(generation)
    assert cluster.engine.submitted[0].sampling.seed == generation.seed
    other = await cluster.gateway.generate(call(seed=None, max_tokens=3))
    await collect(other)
    assert other.seed != generation.seed


async def test_one_sample_ends_early_and_the_others_go_on(cluster):
    def script(request, index, position):
        return 257 if index == 1 and position == 2 else ids_of("a")[0]

    cluster.engine.script = script
    outputs = await cluster.run(call(n=3, max_tokens=6))
    assert [len(output.token_ids) for output in outputs] == [6, 3, 6]
    assert [output.finish_reason.value for output in outputs] == ["length", "stop", "length"]


async def test_stop_string_ends_the_text_and_tells_the_engine(cluster):
    cluster.say("one two three four")
    engine, num_tokens = cluster.engine, len("one two three")
    engine.token_budget = num_tokens + 2  # it runs ahead of what the gateway has seen
    generation = await cluster.gateway.generate(call(stop=("three",)))
    await until(lambda: engine.finished, engine.changed)
    engine.gate.set()
    (output,) = merge_deltas(await collect(generation))
    assert output.text == "one two "
    assert output.finish_reason is FinishReason.STOP
    assert output.token_ids == tuple(ids_of("one two three"))
    assert output.usage.completion_tokens == num_tokens
    assert engine.finished == [(engine.submitted[0].request_key, 0, num_tokens)]
    assert not engine.cancelled


async def test_no_delta_shows_the_beginning_of_a_stop_string(cluster):
    cluster.say("abcDEFGHIJ")
    generation = await cluster.gateway.generate(call(stop=("DEFGHIJ",)))
    assert "".join(delta.text for delta in await collect(generation)) == "abc"
    cluster.say("abcDEFx")
    generation = await cluster.gateway.generate(call(stop=("DEFGHIJ",)))
    assert "".join(delta.text for delta in await collect(generation)) == "abcDEFx"


async def test_stop_strings_count_only_behind_min_tokens(cluster):
    cluster.say("a.b.c.d")
    (output,) = await cluster.run(call(stop=(".",), min_tokens=3))
    assert output.text == "a.b"


async def test_what_was_withheld_is_flushed_at_the_end(cluster):
    cluster.say("abcDEF")
    (output,) = await cluster.run(call(stop=("DEFG",)))
    assert output.text == "abcDEF"


async def test_special_tokens_and_stop_tokens_are_no_text(cluster):
    cluster.say("abc")
    (output,) = await cluster.run(call(stop_token_ids=(ids_of("c")[0],)))
    assert output.text == "ab" + ("" if output.finish_reason else "c")
    (output,) = await cluster.run(call(skip_special_tokens=False))
    assert output.text == "abc</s>"


async def test_logprobs_go_with_their_tokens(cluster):
    outputs = await cluster.run(call(logprobs=3, prompt_logprobs=2, max_tokens=4))
    (output,) = outputs
    assert [entry.token_ids[0] for entry in output.logprobs] == list(output.token_ids)
    assert len(output.prompt_logprobs) == 6
    assert output.prompt_logprobs[0] is None


async def test_max_tokens_zero_only_computes_the_prompt(cluster):
    (output,) = await cluster.run(call(max_tokens=0))
    assert output.token_ids == ()
    assert output.finish_reason is FinishReason.LENGTH
    assert output.usage.first_token_s is None


async def test_chat_goes_through_the_template(cluster):
    messages = [{"role": "user", "content": "hi"}]
    generate = GenerateCall(ChatPrompt(messages), sampling=SamplingParams(max_tokens=1, seed=0))
    await cluster.run(generate)
    assert cluster.engine.submitted[0].prompt_token_ids == tuple(ids_of("<user>hi\n<assistant>"))


# -- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (GenerateCall(TokenPrompt([])), "token_ids"),
        (GenerateCall(TokenPrompt([258])), "token_ids.ids"),
        (GenerateCall(TextPrompt("", add_special_tokens=False)), "text"),
        (GenerateCall(TextPrompt("lone \ud83d")), "text"),
        (GenerateCall(TextPrompt("x" * MAX_CONTEXT)), "text"),
        (GenerateCall(TextPrompt("x" * 10_000_000)), "text"),
        (GenerateCall(ChatPrompt([])), "chat.messages"),
        (GenerateCall(ChatPrompt([{"role": "bad", "content": ""}])), "chat.messages"),
        (call(max_tokens=MAX_CONTEXT - 5), "sampling.max_tokens"),
        (call(max_tokens=2**31), "sampling.max_tokens"),
        (call(stop_token_ids=(258,)), "sampling.stop_token_ids"),
        (call(logit_bias=((258, 1.0),)), "sampling.logit_bias"),
        (GenerateCall(TextPrompt("x"), resume_token_ids=(999,)), "resume_token_ids"),
    ],
)
async def test_a_bad_call_names_its_field_and_reaches_no_engine(cluster, wrong, field):
    with pytest.raises(errors.InvalidArgument) as caught:
        await cluster.gateway.generate(wrong)
    assert caught.value.field == field
    assert not cluster.controller.reserved
    (output,) = await cluster.run(call(max_tokens=2))
    assert len(output.token_ids) == 2, "others are served"


async def test_an_empty_text_with_bos_is_a_prompt(cluster):
    await cluster.run(call("", max_tokens=1))
    assert cluster.engine.submitted[0].prompt_token_ids == (256,)


async def test_an_empty_text_without_bos_is_refused():
    async with FakeCluster() as cluster:
        cluster.controller.cards = (make_card(tokenizer_dir="/no-bos"),)
        with pytest.raises(errors.InvalidArgument):
            await cluster.gateway.generate(call(""))


async def test_a_chat_without_a_template_is_refused():
    async with FakeCluster() as cluster:
        cluster.controller.cards = (make_card(tokenizer_dir="/no-chat"),)
        with pytest.raises(errors.InvalidArgument, match="no chat template"):
            await cluster.gateway.generate(GenerateCall(ChatPrompt([{"role": "u"}])))


async def test_prompts_of_just_the_context(cluster):
    room = MAX_CONTEXT - 1  # BOS takes one
    (output,) = await cluster.run(call("x" * (room - 1), max_tokens=1))
    assert len(output.token_ids) == 1
    (output,) = await cluster.run(call("x" * room, max_tokens=0))
    assert output.finish_reason is FinishReason.LENGTH
    with pytest.raises(errors.InvalidArgument):
        await cluster.gateway.generate(call("x" * room, max_tokens=1))


async def test_models_are_found_by_name_and_alias_and_need_one_if_several(cluster):
    cluster.controller.cards = (make_card("a", aliases=("alias",)), make_card("b"))
    await cluster.gateway._models.refresh()
    assert (await cluster.gateway.tokenize("alias", TextPrompt("x"))).model.card.model == "a"
    with pytest.raises(errors.ModelNotFound, match="a, b"):
        await cluster.gateway.tokenize("c", TextPrompt("x"))
    with pytest.raises(errors.InvalidArgument):
        await cluster.gateway.tokenize("", TextPrompt("x"))


async def test_models_stay_known_while_the_controller_is_away(cluster):
    await cluster.gateway.models()

    async def away() -> tuple[()]:
        raise errors.Unavailable("restarting")

    cluster.controller.model_cards = away
    assert [model.card.model for model in await cluster.gateway.models()] == ["tiny"]
    assert (await cluster.run(call(max_tokens=1)))[0].token_ids


async def test_without_any_replica_it_is_unavailable(cluster):
    cluster.controller.cards = ()
    await cluster.gateway._models.refresh()
    with pytest.raises(errors.Unavailable) as caught:
        await cluster.run(call())
    assert caught.value.retry_after_s is not None


@pytest.mark.parametrize("name", ["tiny", ""])
async def test_a_request_for_a_model_on_demand_is_held_until_it_has_a_card(name: str):
    async with FakeCluster(on_demand=OnDemand(("tiny",), 30.0)) as cluster:
        cluster.controller.cards = ()
        await cluster.gateway._models.refresh()
        assert cluster.gateway.is_ready
        answer = asyncio.create_task(cluster.run(replace(call(max_tokens=2), model=name)))
        while not cluster.gateway.held:
            await asyncio.sleep(0)
        assert cluster.gateway.held == {"tiny": 1}
        cluster.controller.cards = (make_card(),)
        (output,) = await answer
        assert len(output.token_ids) == 2
        assert cluster.gateway.held == {}


async def test_a_held_request_outlives_a_controller_that_forgets_the_model():
    async with FakeCluster(on_demand=OnDemand(("tiny",), 30.0)) as cluster:
        controller = cluster.controller
        controller.answers = [
            errors.Unavailable("restarting", retry_after_s=1.0),
            Refused("k", 1, "Unavailable", "no replica of this model has registered yet", 1.0),
            Refused("k", 1, "ModelNotFound", "model 'tiny' is not served here; served: none"),
        ]
        answer = asyncio.create_task(cluster.run(call(max_tokens=2)))
        await until(lambda: controller.reserved, controller.changed)
        controller.cards = ()  # its last replica has gone since
        while cluster.gateway.held != {"tiny": 1}:
            await asyncio.sleep(0.001)
        assert not controller.answers and not answer.done()
        controller.cards = (make_card(),)
        (output,) = await answer
        assert len(output.token_ids) == 2
        assert len({(sent.request_key, sent.attempt) for sent in controller.reserved}) == 1


async def test_a_held_request_ends_with_its_time_or_its_clients_deadline():
    async with FakeCluster(on_demand=OnDemand(("tiny",), 0.01)) as cluster:
        cluster.controller.cards = ()
        await cluster.gateway._models.refresh()
        with pytest.raises(errors.Unavailable, match="no replica of tiny came"):
            await cluster.run(call())
    async with FakeCluster(on_demand=OnDemand(("tiny",), 30.0)) as cluster:
        cluster.controller.cards = ()
        await cluster.gateway._models.refresh()
        with pytest.raises(errors.DeadlineExceeded):
            await cluster.run(replace(call(), deadline_s=0.05))
        assert cluster.gateway.held == {}


async def test_a_refusal_reaches_the_client_with_its_hint(cluster):
    refused = Refused("k", 1, "Overloaded", "the queue is full", 3.5, "token")
    cluster.controller.answers.append(refused)
    with pytest.raises(errors.Overloaded) as caught:
        await cluster.run(call())
    assert (caught.value.retry_after_s, caught.value.retry_token) == (3.5, "token")


async def test_a_controller_that_restarts_costs_time_only(cluster):
    cluster.controller.answers.append(errors.Unavailable("restarting", retry_after_s=1.0))
    (output,) = await cluster.run(call(max_tokens=2))
    assert len(output.token_ids) == 2


# -- failures --------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [(), ("zzzz",)])
@pytest.mark.parametrize("at", [1, 37, 99])
async def test_a_stream_goes_on_at_another_replica_without_a_seam(cluster, at, stop):
    expected = await cluster.run(call(n=2, stop=stop))
    for leader in cluster.leaders:
        leader.engine.submitted.clear()
    cluster.engine.tokens_done = 0
    cluster.engine.token_budget = 2 * at
    cluster.engine.on_budget = cluster.leaders[0].kill
    deltas = await collect(await cluster.gateway.generate(call(n=2, stop=stop)))
    outputs = merge_deltas(deltas)
    assert [output.token_ids for output in outputs] == [o.token_ids for o in expected]
    assert [output.text for output in outputs] == [o.text for o in expected]
    assert [output.usage.replica for output in outputs] == ["r1", "r1"]
    assert outputs[0].usage.resumes == 1
    assert outputs[0].usage.completion_tokens == 100
    assert cluster.controller.failed == ["r0"]
    assert cluster.controller.reserved[-1].excluded == ("r0",)
    (resumed,) = cluster.leaders[1].engine.submitted
    assert resumed.sampling.seed == 7
    assert resumed.prompt_token_ids == (256, *ids_of("hello")), "prompt and output stay apart"
    assert all(len(sample.output_token_ids) <= at for sample in resumed.samples)
    has_begun = any(sample.output_token_ids for sample in resumed.samples)
    weights = make_card().identity.weights if has_begun else None
    assert cluster.controller.reserved[-1].weights == weights


async def test_what_has_not_begun_may_begin_with_any_weights(cluster):
    cluster.engine.reject.append(errors.Unavailable("the replica is draining"))
    (output,) = await cluster.run(call())
    assert output.usage.resumes == 1
    assert [request.weights for request in cluster.controller.reserved] == [None, None]


async def test_a_kill_while_part_of_a_stop_string_is_withheld(cluster):
    cluster.say("abcDEFxyz")
    cluster.engine.token_budget = len("abcDE")
    cluster.engine.on_budget = cluster.leaders[0].kill
    (output,) = await cluster.run(call(stop=("DEFG",)))
    assert output.text == "abcDEFxyz"


async def test_a_short_break_of_the_stream_is_mended_in_place(cluster):
    expected = await cluster.run(call())
    engine, leader = cluster.engine, cluster.leaders[0]
    engine.tokens_done, engine.token_budget = 0, 40

    def cut() -> None:
        leader.port.cut()
        engine.gate.set()

    engine.on_budget = cut
    (output,) = await cluster.run(call())
    assert output.token_ids == expected[0].token_ids
    assert (output.usage.replica, output.usage.resumes) == ("r0", 0)
    assert leader.port.num_connections == 2
    assert len(engine.submitted) == 2, "nothing was submitted twice"


async def test_a_death_between_lease_and_first_token(cluster):
    cluster.engine.gate.clear()
    generation = await cluster.gateway.generate(call(max_tokens=5))
    await until(lambda: cluster.engine.submitted, cluster.engine.changed)
    cluster.leaders[0].kill()
    (output,) = merge_deltas(await collect(generation))
    assert len(output.token_ids) == 5
    assert output.usage.replica == "r1"


async def test_a_lease_the_leader_rejects_is_asked_for_again(cluster):
    cluster.engine.reject = [errors.Overloaded("taken"), errors.Overloaded("taken")]
    (output,) = await cluster.run(call(max_tokens=3))
    assert len(output.token_ids) == 3
    assert [request.attempt for request in cluster.controller.reserved] == [1, 2, 3]
    assert not cluster.controller.failed


async def test_when_every_replica_is_lost_it_is_unavailable(cluster):
    cluster.engine.token_budget = 10
    cluster.engine.on_budget = lambda: [leader.kill() for leader in cluster.leaders]
    generation = await cluster.gateway.generate(call())
    with pytest.raises(errors.Unavailable) as caught:
        await collect(generation)
    assert caught.value.retry_after_s is not None


async def test_a_replica_that_lost_the_gateways_session_takes_the_request_again(cluster):
    (expected,) = await cluster.run(call(max_tokens=50))
    engine, leader = cluster.engine, cluster.leaders[0]
    cluster.controller.leaders = [leader]
    engine.tokens_done, engine.token_budget = 0, 10
    generation = await cluster.gateway.generate(call(max_tokens=50))
    deltas = []
    while sum(len(delta.token_ids) for delta in deltas) < 10:
        deltas += await anext(generation)
    leader.server._drop(leader.server._attachments["gw"])
    engine.gate.set()
    (output,) = merge_deltas(deltas + await collect(generation))
    assert output.token_ids == expected.token_ids
    assert (output.usage.resumes, output.usage.replica) == (1, "r0")
    assert cluster.controller.failed == ["r0"]


# -- cancel, disconnect, deadline ------------------------------------------------------------


async def test_cancel_in_the_controllers_queue_gives_the_ticket_back(cluster):
    cluster.controller.is_full = True
    generation = await cluster.gateway.generate(call())
    await until(lambda: cluster.controller.queue, cluster.controller.changed)
    await generation.aclose()
    await until(lambda: cluster.controller.released, cluster.controller.changed)
    with pytest.raises(errors.RequestCancelled):
        await collect(generation)
    assert not cluster.controller.queue
    assert not cluster.engine.submitted


async def test_cancel_while_the_controller_decides_gives_the_lease_back(cluster):
    generation = await cluster.gateway.generate(call())
    await until(lambda: cluster.controller.reserved, cluster.controller.changed)
    await generation.aclose()
    await until(lambda: cluster.controller.released, cluster.controller.changed)


@pytest.mark.parametrize("num_tokens", [0, 20])
async def test_cancel_in_prefill_and_decode_reaches_the_engine(cluster, num_tokens):
    engine = cluster.engine
    if num_tokens:
        engine.token_budget = num_tokens
    else:
        engine.gate.clear()
    generation = await cluster.gateway.generate(call())
    await until(lambda: engine.submitted, engine.changed)
    seen = 0
    while seen < num_tokens:
        seen += sum(len(delta.token_ids) for delta in await anext(generation))
    await generation.aclose()
    await until(lambda: engine.cancelled, engine.changed)
    assert engine.cancelled == [engine.submitted[0].request_key]
    engine.gate.set()
    with pytest.raises(errors.RequestCancelled):
        await anext(generation)


async def test_cancel_by_id_ends_only_the_tenants_own(cluster):
    cluster.engine.gate.clear()
    mine = GenerateCall(TextPrompt("x"), tenant="me", request_id="same")
    other = GenerateCall(TextPrompt("x"), tenant="you", request_id="same")
    generations = [await cluster.gateway.generate(c) for c in (mine, mine, other)]
    await until(lambda: len(cluster.engine.submitted) == 3, cluster.engine.changed)
    keys = [request.request_key for request in cluster.engine.submitted]
    assert len(set(keys)) == 3, "a client's id is no internal key"
    assert not any("same" in key for key in keys)
    assert cluster.gateway.cancel("me", "same") == 2
    assert cluster.gateway.cancel("nobody", "same") == 0
    for generation in generations[:2]:
        with pytest.raises(errors.RequestCancelled):
            await collect(generation)
    assert cluster.gateway.num_running == 1
    await generations[2].aclose()


@pytest.mark.parametrize("queued", [True, False])
async def test_a_deadline_ends_it_queued_or_running(cluster, queued):
    cluster.controller.is_full = queued
    cluster.engine.gate.clear()
    generation = await cluster.gateway.generate(
        GenerateCall(TextPrompt("x"), deadline_s=0.8, sampling=SamplingParams(max_tokens=3))
    )
    with pytest.raises(errors.DeadlineExceeded):
        await collect(generation)
    assert 0 < cluster.controller.reserved[0].deadline_s <= 0.8
    if queued:
        await until(lambda: cluster.controller.released, cluster.controller.changed)
        assert not cluster.engine.submitted
    else:
        assert 0 < cluster.engine.submitted[0].deadline_s <= 0.8


async def test_a_deadline_that_has_passed_reserves_nothing(cluster):
    with pytest.raises(errors.DeadlineExceeded):
        await cluster.run(GenerateCall(TextPrompt("x"), deadline_s=-1.0))
    assert not cluster.controller.reserved


async def test_a_grant_after_a_wait_is_served(cluster):
    cluster.controller.is_full = True
    generation = await cluster.gateway.generate(call(max_tokens=3))
    await until(lambda: cluster.controller.queue, cluster.controller.changed)
    cluster.controller.grant_all()
    (output,) = merge_deltas(await collect(generation))
    assert len(output.token_ids) == 3


async def test_many_random_cancels_leave_nothing(cluster):
    async def one(i: int) -> None:
        generation = await cluster.gateway.generate(call(max_tokens=i % 50, n=1 + i % 4))
        for _ in range(i % 7):
            await asyncio.sleep(0)
        if i % 3:
            await anext(generation, None)
        await generation.aclose()

    await asyncio.gather(*(one(i) for i in range(200)))
    await until(lambda: not cluster.engine.num_live, cluster.engine.changed)
    assert cluster.gateway._running == {}


# -- public resume ---------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 50, 99, 100])
async def test_a_client_goes_on_where_its_stream_broke(cluster, at):
    whole = merge_deltas(await collect(await cluster.gateway.generate(call())))[0]
    known = whole.token_ids[:at]
    resumed = GenerateCall(
        TextPrompt("hello"),
        sampling=SamplingParams(max_tokens=100, seed=7),
        resume_token_ids=known,
    )
    (output,) = await cluster.run(resumed)
    assert known + output.token_ids == whole.token_ids
    assert TOKENIZER.decode(known) + output.text == whole.text
    assert output.finish_reason is whole.finish_reason
    assert output.usage.completion_tokens == 100


async def test_resume_behind_a_withheld_beginning_shows_it_after_all(cluster):
    cluster.say("abcDEFx")
    resumed = GenerateCall(
        TextPrompt("hello"),
        sampling=SamplingParams(max_tokens=100, stop=("DEFG",)),
        resume_token_ids=tuple(ids_of("abcDE")),
    )
    (output,) = await cluster.run(resumed)
    assert output.text == "DEFx"


async def test_resume_of_what_was_complete_ends_at_once(cluster):
    cluster.say("abc")
    resumed = GenerateCall(TextPrompt("hello"), resume_token_ids=(*ids_of("abc"), 257))
    (output,) = await cluster.run(resumed)
    assert output.finish_reason is FinishReason.STOP
    assert not cluster.controller.reserved
