"""Drives a real ModelRunner in tests: by the real scheduler, or by steps written by hand."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pagefleet.protos.messages import (
    CacheIdentity,
    EngineRequest,
    FinishReason,
    SampleStart,
    SamplingParams,
    TokenLogprobs,
    Usage,
)
from pagefleet.scheduler.config import PreemptionMode
from pagefleet.scheduler.output import NewRow, SchedulerOutput
from pagefleet.scheduler.scheduler import Scheduler
from pagefleet.workers.config import WorkerConfig
from pagefleet.workers.model_runner import LaunchedStep, ModelRunner

IDENTITY = CacheIdentity("test", 0, "float32", 16)
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=32)


def load_runner(folder: Path, **settings: object) -> ModelRunner:
    """A runner of one thread and 64 blocks unless told otherwise."""
    fields = {"num_blocks": 64, "num_threads": 1, "max_num_sequences": 16} | settings
    return ModelRunner.load(WorkerConfig(model=str(folder), **fields))  # pyright: ignore


def random_prompt(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Token ids that say nothing."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


@dataclass(slots=True)
class Answer:
    """All that one sample of a request was told."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: str = ""
    score: float | None = None


def make_request(
    key: str, prompt: Sequence[int], sampling: SamplingParams = GREEDY, n: int = 1
) -> EngineRequest:
    """A request of n samples."""
    starts = tuple(SampleStart(index) for index in range(n))
    return EngineRequest(key, tuple(int(t) for t in prompt), sampling, starts)


@dataclass(slots=True)
class Guesses:
    """Guesses that are right but for a share of them, since the answers are known."""

    answers: dict[tuple[str, int], Answer]
    share: float
    seed: int = 0

    def replace_in(self, scheduler: Scheduler) -> None:
        """Let them be what the scheduler proposes."""
        chance, batch = random.Random(self.seed), scheduler._batch

        def guess(row: int, depth: int) -> list[int]:
            sequence = batch.sequence(row)
            tokens = self.answers[sequence.request.key, sequence.index].token_ids
            number = batch.num_known(row) - sequence.num_prompt_tokens
            right = (tokens[number:] + [1] * depth)[:depth]
            return [token if chance.random() < self.share else max(1, token) - 1 for token in right]

        scheduler._speculation._propose = guess  # pyright: ignore


def serve(
    runner: ModelRunner,
    requests: Iterable[EngineRequest],
    *,
    num_blocks: int | None = None,
    num_host_blocks: int = 0,
    prefill_chunk: int | None = None,
    max_num_batched_tokens: int = 512,
    enable_prefix_caching: bool = True,
    preemption_mode: PreemptionMode = PreemptionMode.RECOMPUTE,
    preempt_every: int | None = None,
    guesses: Guesses | None = None,
    overlap: bool = False,
) -> dict[tuple[str, int], Answer]:
    """Run all requests together to their ends; the pool is checked after every step.

    num_blocks: of the scheduler's pool, at most the runner's; fewer forces preemption.
    guesses: what is guessed ahead, instead of what the requests' texts suggest.
    """
    config = runner.config.scheduler_config(
        num_blocks or runner.num_blocks, num_host_blocks, runner.model_info.max_context
    )
    config = replace(
        config,
        block_bytes=runner.storage.layout.num_bytes,
        prefill_chunk=prefill_chunk,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
        preemption_mode=preemption_mode,
        preempt_every=preempt_every or config.preempt_every,
    )
    if guesses is not None:
        config = replace(config, num_speculative_tokens=4)
    scheduler = Scheduler(config, IDENTITY, runner.model_info.eos_token_ids)
    if guesses is not None:
        guesses.replace_in(scheduler)
    for request in requests:
        scheduler.add_request(request, now=0.0)
    return drain(runner, scheduler, overlap)


@dataclass(slots=True)
class Steps:
    """Schedules and runs steps as an engine does, and compares the books after each."""

    runner: ModelRunner
    scheduler: Scheduler
    overlap: bool = False
    number: int = 0
    in_flight: list[LaunchedStep] = field(default_factory=list[LaunchedStep])

    def step(self) -> None:
        """Schedule one, launch it, and finish the one before it."""
        output = self.scheduler.schedule(now=float(self.number))
        if output is None:
            self.finish()
            self.scheduler.copies_done(self.runner.poll_copies())
        elif self.overlap:
            self.number += 1
            self.in_flight.append(self.runner.launch(output))
            self.finish(num_left=1)
        else:
            self.number += 1
            self.scheduler.update(output, self.runner.execute(output), now=float(self.number))
        self.scheduler.check_integrity()

    def finish(self, num_left: int = 0) -> None:
        """Wait for the steps in flight but for so many."""
        while len(self.in_flight) > num_left:
            step = self.in_flight.pop(0)
            result = self.runner.finish(step)
            self.scheduler.update(step.output, result, now=float(self.number))
            self.scheduler.check_integrity()


def drain(
    runner: ModelRunner, scheduler: Scheduler, overlap: bool = False
) -> dict[tuple[str, int], Answer]:
    """Step until nothing is left. overlap: a step is launched before the one before it is
    finished, as on a GPU."""
    answers: dict[tuple[str, int], Answer] = {}
    steps = Steps(runner, scheduler, overlap)
    while scheduler.has_unfinished():
        steps.step()
        collect(scheduler, answers)
    steps.finish()
    while has_open_copies(scheduler):  # the runner serves other schedulers after this one
        scheduler.copies_done(runner.poll_copies())
    return answers


def has_open_copies(scheduler: Scheduler) -> bool:
    """Blocks stay fenced while a copy touches them."""
    stats = scheduler.stats()
    return bool(stats.device.fenced or stats.host.fenced)


def collect(scheduler: Scheduler, answers: dict[tuple[str, int], Answer]) -> None:
    """Take the new deltas; tokens must come in order, each once."""
    for delta in scheduler.take_deltas():
        answer = answers.setdefault((delta.request_key, delta.index), Answer())
        assert delta.first_position == len(answer.token_ids), f"{delta} is out of order"
        answer.token_ids += delta.token_ids
        answer.logprobs += delta.logprobs
        answer.prompt_logprobs += delta.prompt_logprobs
        answer.finish_reason = delta.finish_reason or answer.finish_reason
        answer.usage = delta.usage or answer.usage
        answer.error = delta.error or answer.error
        answer.score = delta.score


@dataclass(slots=True)
class HandWritten:
    """Steps without a scheduler: rows whose blocks lie in a random order over the pool."""

    runner: ModelRunner
    seed: int = 0
    step: int = 0
    free: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        generator = np.random.default_rng(self.seed)
        self.free = generator.permutation(self.runner.num_blocks).tolist()

    def row(
        self,
        row: int,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        num_blocks: int = 0,
        sample_index: int = 0,
        num_prompt_tokens: int | None = None,
    ) -> NewRow:
        """A new row with blocks for its prompt, or `num_blocks` if that is more."""
        count = max(num_blocks, -(-len(prompt) // self.runner.config.block_size))
        table = np.array([self.free.pop() for _ in range(count)], dtype=np.int32)
        return NewRow(
            row=row,
            sequence_id=row,
            token_ids=np.array(prompt, dtype=np.int32),
            num_prompt_tokens=num_prompt_tokens or len(prompt),
            block_table=table,
            sampling=sampling,
            sample_index=sample_index,
        )

    def output(
        self,
        scheduled: dict[int, tuple[int, int]],
        new_rows: Sequence[NewRow] = (),
        sample_rows: Sequence[int] | None = None,
    ) -> SchedulerOutput:
        """scheduled: row → (position of its first token, how many); all sample unless said."""
        self.step += 1
        rows = sorted(scheduled, key=lambda row: scheduled[row][1] != 1)
        sampling = [row for row in rows if sample_rows is None or row in sample_rows]
        return SchedulerOutput(
            step=self.step,
            rows=np.array(rows, dtype=np.int32),
            num_scheduled_tokens=np.array([scheduled[r][1] for r in rows], dtype=np.int32),
            num_computed_tokens=np.array([scheduled[r][0] for r in rows], dtype=np.int32),
            sample_entries=np.array([rows.index(row) for row in sampling], dtype=np.int32),
            sample_rows=np.array(sampling, dtype=np.int32),
            new_rows=tuple(new_rows),
        )


@torch.inference_mode()
def all_logits(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], chunk: int, seed: int = 0
) -> list[Tensor]:
    """float32 [len(prompt), vocab] of each prompt, all rows together, `chunk` tokens a step.

    What is not computed yet is NaN in the pool, so reading a slot too early shows. On ranks
    other than the leader there are no logits: an empty list.
    """
    runner.storage.pool.fill_(float("nan"))
    hand = HandWritten(runner, seed)
    new_rows = [hand.row(row, prompt) for row, prompt in enumerate(prompts)]
    parts: list[list[Tensor]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    while any(done[row] < len(prompt) for row, prompt in enumerate(prompts)):
        scheduled = {
            row: (done[row], min(chunk, len(prompt) - done[row]))
            for row, prompt in enumerate(prompts)
            if done[row] < len(prompt)
        }
        output = hand.output(scheduled, new_rows)
        new_rows = []
        runner.batch.apply(output)
        step = runner.batch.prepare(output)
        hidden = runner.decoder.forward(step.token_ids, runner.storage.layers, step.metadata, None)
        logits = runner.decoder.logits(hidden)
        sizes = output.num_scheduled_tokens.tolist()
        for row, size in zip(output.rows.tolist(), sizes, strict=True):
            done[row] += size
        if logits is None:
            continue
        for row, part in zip(output.rows.tolist(), logits.clone().split(sizes), strict=True):
            parts[row].append(part)
    return [torch.cat(part) for part in parts if part]
