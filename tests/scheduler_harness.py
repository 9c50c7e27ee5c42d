"""A scheduler and a fake model stepped together; a test states only what it is about."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from fakes import FakeModel, oracle_beams, oracle_tokens

from pagefleet.protos.messages import (
    AdmissionClass,
    CacheIdentity,
    EngineRequest,
    FinishReason,
    SampleStart,
    SamplingParams,
    SequenceDelta,
)
from pagefleet.scheduler.config import SchedulerConfig
from pagefleet.scheduler.output import SchedulerOutput
from pagefleet.scheduler.scheduler import Scheduler

_numbers = count()


def make_identity(**changes: object) -> CacheIdentity:
    """The identity of a model that does not exist."""
    fields: dict[str, object] = {
        "model_fingerprint": "fake",
        "weights_version": 0,
        "kv_dtype": "float32",
        "block_size": 16,
    }
    return CacheIdentity(**{**fields, **changes})  # type: ignore[arg-type]


def make_request(
    prompt: Iterable[int] | int = 5,
    *,
    key: str | None = None,
    outputs: Sequence[tuple[int, ...]] = (),
    lease_id: int | None = None,
    lease_blocks: int = 0,
    admission_class: AdmissionClass = AdmissionClass.STANDARD,
    priority: int = 0,
    deadline_s: float | None = None,
    cache_salt: str = "",
    adapter: str = "",
    **sampling: object,
) -> EngineRequest:
    """prompt: token ids, or how many. outputs: what resumed samples have said."""
    tokens = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else tuple(prompt)
    params = SamplingParams(**{"max_tokens": 4, "seed": 0, **sampling})  # type: ignore[arg-type]
    starts = (
        tuple(SampleStart(i, output) for i, output in enumerate(outputs))
        if outputs
        else tuple(SampleStart(i) for i in range(params.n))
    )
    return EngineRequest(
        request_key=f"request-{next(_numbers)}" if key is None else key,
        prompt_token_ids=tokens,
        sampling=params,
        samples=starts,
        lease_id=lease_id,
        lease_blocks=lease_blocks,
        admission_class=admission_class,
        priority=priority,
        deadline_s=deadline_s,
        cache_salt=cache_salt,
        adapter=adapter,
    )


@dataclass
class Sample:
    """What a client has been told of one sample."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    last: SequenceDelta | None = None
    deltas: list[SequenceDelta] = field(default_factory=list)


class FenceWatch:
    """Sees that no block is written for a new owner while a step in flight may touch it.

    A fake model runs steps one after the other, so it would not notice.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tables: dict[int, list[int]] = {}
        self._touched: dict[int, set[int]] = {}

    def launch(self, output: SchedulerOutput) -> None:
        for row in output.removed_rows.tolist():
            del self._tables[row]
        for row, length in zip(output.cut_rows.tolist(), output.cut_lengths.tolist(), strict=True):
            del self._tables[row][length:]
        held = {block for table in self._tables.values() for block in table}
        for new in output.new_rows:
            self._tables[new.row] = new.block_table.tolist()
        for row, block in zip(output.tail_rows.tolist(), output.tail_blocks, strict=True):
            self._tables[row][-1] = int(block)
        for row, block in zip(output.table_rows.tolist(), output.table_blocks, strict=True):
            self._tables[row].append(int(block))
        busy = set[int]().union(*self._touched.values())
        starts = output.num_computed_tokens.tolist()
        for row, start in zip(output.rows.tolist(), starts, strict=True):
            written = self._tables[row][start // self._block_size :]
            reused = (set(written) - held) & busy
            assert not reused, f"step {output.step} writes blocks {reused} of a step in flight"
        self._touched[output.step] = {
            block for row in output.rows.tolist() for block in self._tables[row]
        }

    def land(self, output: SchedulerOutput) -> None:
        del self._touched[output.step]


class Cluster:
    """A scheduler and a fake model, stepped together, checked after every step.

    run_ahead: step N+1 is scheduled before the result of step N is taken in.
    """

    def __init__(
        self, *, run_ahead: bool = False, vocab_size: int = 1000, **config: object
    ) -> None:
        eos = config.pop("eos", ())
        self.eos: tuple[int, ...] = tuple(eos)  # type: ignore[arg-type]
        settings = SchedulerConfig(**{"num_blocks": 64, **config})  # type: ignore[arg-type]
        identity = make_identity(block_size=settings.block_size)
        self.scheduler = Scheduler(settings, identity, self.eos)
        self.model = FakeModel(
            settings.num_blocks,
            settings.block_size,
            settings.num_host_blocks,
            vocab_size=vocab_size,
        )
        self.run_ahead = run_ahead
        self.now = 0.0
        self.requests: dict[str, EngineRequest] = {}
        self.samples: dict[tuple[str, int], Sample] = {}
        self.steps: list[SchedulerOutput] = []
        self.in_flight: list[SchedulerOutput] = []
        self.fences = FenceWatch(settings.block_size)

    def guess_by_oracle(self, share: float, seed: int = 0) -> None:
        """Let drafts be what comes, but for a share of the tokens; behind an end anything."""
        chance, oracles = random.Random(seed), dict[int, list[int]]()
        batch = self.scheduler._batch

        def guess(row: int, depth: int) -> list[int]:
            sequence = batch.sequence(row)
            if sequence.id not in oracles:
                request = self.requests[sequence.request.key]
                oracles[sequence.id] = self.oracle(request, sequence.index)
            number = batch.num_known(row) - sequence.num_prompt_tokens
            right = (oracles[sequence.id][number:] + [1] * depth)[:depth]
            return [token if chance.random() < share else token + 1 for token in right]

        self.scheduler._speculation._propose = guess

    def add(self, *args: object, **kwargs: object) -> EngineRequest:
        """Make a request and submit it."""
        return self.submit(make_request(*args, **kwargs))  # type: ignore[arg-type]

    def submit(self, request: EngineRequest) -> EngineRequest:
        self.scheduler.add_request(request, self.now)
        self.requests[request.request_key] = request
        for start in request.samples:
            sample = Sample(tokens=list(start.output_token_ids))
            self.samples[request.request_key, start.index] = sample
        self.scheduler.check_integrity()
        return request

    def launch(self) -> SchedulerOutput | None:
        """Schedule a step without taking in its result."""
        output = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        if output is not None:
            self.steps.append(output)
            self.in_flight.append(output)
            self.fences.launch(output)
        return output

    def land(self) -> None:
        """Execute the oldest step in flight and take in its result."""
        output = self.in_flight.pop(0)
        self.fences.land(output)
        result = self.model.execute(output)
        self.now += 0.01
        self.scheduler.update(output, result, self.now)
        self.scheduler.check_integrity()
        self.take()

    def step(self) -> bool:
        """One step. False: there was nothing to do."""
        output = self.launch()
        if output is None and not self.in_flight:
            self.now += 0.01
            done = self.model.finish_copies() if not self.model.hold_copies else ()
            self.scheduler.copies_done(done)
            self.take()
            return bool(done)
        if not self.run_ahead or output is None or len(self.in_flight) > 1:
            self.land()
        return True

    def take(self) -> None:
        """Collect deltas, each in its place."""
        for delta in self.scheduler.take_deltas():
            sample = self.samples[delta.request_key, delta.index]
            assert sample.finish_reason is None, f"told after its end: {delta}"
            if delta.token_ids:
                assert delta.first_position == len(sample.tokens), f"gap or repetition: {delta}"
            sample.tokens += delta.token_ids
            sample.deltas.append(delta)
            if delta.finish_reason is not None:
                sample.finish_reason = delta.finish_reason
                sample.last = delta

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError(f"not finished after {max_steps} steps: {self.scheduler.stats()}")

    def sample(self, request: EngineRequest, index: int = 0) -> Sample:
        return self.samples[request.request_key, index]

    def tokens(self, request: EngineRequest, index: int = 0) -> list[int]:
        return self.sample(request, index).tokens

    def cached_tokens(self, request: EngineRequest, index: int = 0) -> int:
        last = self.sample(request, index).last
        assert last is not None and last.usage is not None
        return last.usage.cached_tokens

    def oracle(self, request: EngineRequest, index: int = 0) -> list[int]:
        """What the request must answer alone."""
        if request.sampling.beam_width > 1 and request.sampling.max_tokens != 0:
            beams = oracle_beams(
                request.prompt_token_ids,
                replace(
                    request.sampling, max_tokens=self._max_outputs(request), n=request.sampling.n
                ),
                vocab_size=self.model.vocab_size,
                eos=self.eos,
            )
            return beams[index] if index < len(beams) else []
        return oracle_tokens(
            request.prompt_token_ids,
            request.sampling,
            index,
            vocab_size=self.model.vocab_size,
            eos=self.eos,
            max_context=self.scheduler.config.max_context,
        )

    def _max_outputs(self, request: EngineRequest) -> int:
        room = self.scheduler.config.max_context - len(request.prompt_token_ids)
        asked = request.sampling.max_tokens
        return room if asked is None else min(asked, room)

    def assert_oracle(self, *requests: EngineRequest) -> None:
        """Every sample that came to its end is what it would have been alone."""
        for request in requests or self.requests.values():
            for start in request.samples:
                sample = self.sample(request, start.index)
                expected = self.oracle(request, start.index)
                assert sample.tokens == expected, f"{request.request_key}/{start.index}"

    def assert_idle(self) -> None:
        """Nothing is left of any request."""
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert not self.scheduler.has_unfinished()
        assert stats.num_running == stats.num_waiting == stats.waiting_prefill_tokens == 0
        assert stats.device.referenced == stats.device.fenced == 0
        assert not stats.leases
