"""A seeded fuzzer over scheduler and fake model: episodes of random load on a random replica.

Everything that can go wrong is drawn: lengths around multiples of the block size, shared
prefixes, samples, aborts at every point, deadlines, stop strings, forced preemption, resets,
copies that end late or fail, tiny pools, colliding hashes. All books are compared after every
step; every output is compared with its oracle; at the end nothing may be left.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from scheduler_harness import Cluster, Sample, make_identity, make_request
from transfer_fuzz import TRANSFER_COUNTS, Transfers, random_transfer

from pagefleet.protos.errors import InvalidArgument, Overloaded
from pagefleet.protos.messages import AdmissionClass, EngineRequest, FinishReason
from pagefleet.scheduler.config import PreemptionMode
from pagefleet.scheduler.stats import SchedulerStats

_CLASSES = (
    AdmissionClass.STANDARD,
    AdmissionClass.STANDARD,
    AdmissionClass.BEST_EFFORT,
    AdmissionClass.GUARANTEED,
)


@dataclass
class Totals:
    """What a run has seen: a fuzzer that never swaps proves nothing about swap."""

    episodes: int = 0
    steps: int = 0
    requests: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, stats: SchedulerStats) -> None:
        for name in (
            "preemptions_recompute",
            "preemptions_swap",
            "swaps_refused",
            "copies_on_write",
            "collisions_refused",
            "blocks_evicted",
            "blocks_stored",
            "blocks_loaded",
            "copies_failed",
            "rows_held",
            "hit_tokens",
            "kv_exhausted",
            "expired",
            "leases_refused",
            "draft_tokens",
            "accepted_tokens",
        ):
            self.counts[name] = self.counts.get(name, 0) + getattr(stats, name)

    def add_transfers(self, transfers: Transfers) -> None:
        for name in TRANSFER_COUNTS:
            self.counts[name] = self.counts.get(name, 0) + transfers.counts[name]


class Episode:
    """One random replica under random load."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.block_size = chance.choice((1, 2, 4, 4, 8))
        num_blocks = chance.choice((6, 10, 16, 30, 60))
        self.capacity = num_blocks * self.block_size
        self.copies = chance.choice(("prompt", "prompt", "late", "failing"))
        self.cluster = Cluster(
            run_ahead=chance.random() < 0.5,
            vocab_size=chance.choice((12, 1000)),
            eos=(5,),
            num_blocks=num_blocks,
            block_size=self.block_size,
            num_host_blocks=chance.choice((0, 4, 12, 60, 200)),
            max_num_sequences=chance.choice((1, 2, 4, 8)),
            max_num_batched_tokens=chance.choice((3, 8, 32, 256)),
            prefill_chunk=chance.choice((None, None, 1, 5)),
            max_context=max(8, self.capacity + chance.choice((-3, 0, 20))),
            enable_prefix_caching=chance.random() < 0.85,
            preemption_mode=chance.choice(tuple(PreemptionMode)),
            watermark=chance.choice((0.0, 0.05)),
            block_bytes=chance.choice((0, 1 << 20)),
            write_back_blocks=chance.choice((0, 2, 8)),
            preempt_every=chance.choice((None, None, 3, 7)),
            hash_bits=chance.choice((128, 128, 8, 3)),
            num_speculative_tokens=chance.choice((0, 1, 3, 6)),
            prompt_lookup_min=chance.choice((1, 2)),
        )
        if self.cluster.scheduler.config.num_speculative_tokens and chance.random() < 0.8:
            self.cluster.guess_by_oracle(chance.choice((0.5, 0.9, 1.0)), seed)
        self.cluster.model.hold_copies = self.copies != "prompt"
        self.transfers = Transfers(self.cluster, chance)
        self.alive: list[EngineRequest] = []
        self.ended_by_force: set[tuple[str, int]] = set()
        self.kept: dict[tuple[str, int], int] = {}
        self.had_reset = False

    def run(self, max_steps: int) -> None:
        """Load, then drain, then look whether anything is left."""
        for _ in range(max_steps):
            self._act()
            self._step()
        # Work that is held back by copies must end once they do.
        for _ in range(100_000):
            self._end_copies()
            self.transfers.end()
            is_waiting = self.cluster.model.open_jobs or len(self.cluster.scheduler.imports)
            if not self._step() and not is_waiting:
                break
        else:
            raise AssertionError(f"no end in sight: {self.cluster.scheduler.stats()}")
        self._compare()
        self.cluster.assert_idle()

    def _act(self) -> None:
        chance = self.chance
        dice = chance.random()
        if dice < 0.25:
            self._submit()
        elif dice < 0.29 and self.alive:
            self._abort(chance.choice(self.alive))
        elif dice < 0.31 and self.alive:
            self._finish_early(chance.choice(self.alive))
        elif dice < 0.315:
            self.cluster.scheduler.reset_prefix_cache()
            self.cluster.scheduler.check_integrity()
        elif dice < 0.34:
            self.cluster.scheduler.force_preemption()
            self.cluster.scheduler.check_integrity()
        elif dice < 0.36:
            self.cluster.scheduler.take_route_events()
        elif dice < 0.46:
            identity = make_identity(block_size=self.block_size)
            self.transfers.act(identity, self._prompt())

    def _step(self) -> bool:
        if self.copies != "prompt" and self.chance.random() < 0.3:
            self._end_copies()
        return self.cluster.step()

    def _end_copies(self) -> None:
        model = self.cluster.model
        if model.open_jobs and model.hold_copies:
            ok = self.copies != "failing" or self.chance.random() < 0.5
            done = model.finish_copies(1, ok)
            self.cluster.scheduler.copies_done(done)
            self.cluster.scheduler.check_integrity()

    def _length(self) -> int:
        """Around a multiple of the block size more often than not."""
        chance = self.chance
        if chance.random() < 0.8:
            whole = chance.randrange(1, 6) * self.block_size
            return max(1, whole + chance.choice((-1, 0, 1)))
        return chance.randrange(1, max(2, self.capacity // 2))

    def _prompt(self) -> list[int]:
        """A prefix that others have too, then something of its own."""
        chance = self.chance
        family = chance.randrange(3)
        length = self._length()
        own = chance.randrange(length + 1)
        return [family] * (length - own) + [chance.randrange(4) for _ in range(own)]

    def _submit(self) -> None:
        chance = self.chance
        width = chance.choice((0, 0, 0, 0, 0, 2, 3))
        request = make_request(
            self._prompt(),
            beam_width=width,
            length_penalty=chance.choice((0.0, 1.0, 2.0)),
            n=chance.choice((1, width)) if width else chance.choice((1, 1, 1, 2, 3, 5)),
            max_tokens=chance.choice((0, 1, self.block_size, chance.randrange(40))),
            min_tokens=chance.choice((0, 0, 3)),
            seed=chance.randrange(3),
            ignore_eos=chance.random() < 0.3,
            stop_token_ids=chance.choice(((), (), (7,))),
            priority=chance.randrange(3),
            admission_class=chance.choice(_CLASSES),
            deadline_s=chance.choice((None, None, None, chance.random() * 0.5)),
            cache_salt=chance.choice(("", "", "other")),
            prompt_logprobs=chance.choice((None, None, None, 1)),
        )
        request = replace(request, transfer=random_transfer(chance, request))
        try:
            self.cluster.submit(request)
        except (InvalidArgument, Overloaded):
            return
        self.alive.append(request)

    def _abort(self, request: EngineRequest) -> None:
        if self.cluster.scheduler.abort_request(request.request_key):
            self.ended_by_force.update((request.request_key, s.index) for s in request.samples)
        self.cluster.scheduler.check_integrity()
        self.cluster.take()
        self.alive.remove(request)

    def _finish_early(self, request: EngineRequest) -> None:
        index = self.chance.choice(request.samples).index
        sample = self.cluster.sample(request, index)
        if sample.finish_reason is None:
            keep = self.chance.randrange(len(sample.tokens) + 1)
            if request.sampling.beam_width:  # all of them end
                self.ended_by_force.update((request.request_key, s.index) for s in request.samples)
            self.cluster.scheduler.finish_sequence(
                request.request_key, index, keep, self.cluster.now
            )
            self.cluster.scheduler.check_integrity()
            self.cluster.take()

    def _compare(self) -> None:
        for request in self.cluster.requests.values():
            for start in request.samples:
                key = request.request_key, start.index
                sample = self.cluster.sample(request, start.index)
                oracle = self.cluster.oracle(request, start.index)
                if request.sampling.beam_width and request.sampling.max_tokens:
                    self._compare_beams(key, sample, oracle)
                    continue
                assert sample.tokens == oracle[: len(sample.tokens)], f"{key}: {sample}\n{oracle}"
                if key in self.ended_by_force:
                    continue
                assert sample.finish_reason is not None, f"{key} was never told its end"
                if sample.finish_reason in (FinishReason.LENGTH, FinishReason.STOP):
                    is_whole = len(sample.tokens) == len(oracle)
                    was_cut = sample.last is not None and not sample.last.token_ids
                    assert is_whole or was_cut, f"{key}: {sample}\n{oracle}"
                    self._compare_prompt_logprobs(request, start.index, sample)

    def _compare_prompt_logprobs(self, request: EngineRequest, index: int, sample: Sample) -> None:
        told = [entry for delta in sample.deltas for entry in delta.prompt_logprobs]
        if index == 0 and request.sampling.prompt_logprobs is not None and sample.tokens:
            found = [entry and entry.token_ids[0] for entry in told]
            assert found == [None, *request.prompt_token_ids[1:]], f"{request}: {sample}"
        else:
            assert not told or index == 0, f"{request}: {sample}"

    def _compare_beams(self, key: tuple[str, int], sample: Sample, oracle: list[int]) -> None:
        """Hypotheses are told whole, at the end; who lost a beam to the pool has others."""
        if key in self.ended_by_force:
            return
        assert sample.finish_reason is not None, f"{key} was never told its end"
        whole = sample.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        if whole and not self.cluster.scheduler.stats().kv_exhausted:
            assert sample.tokens == oracle, f"{key}: {sample}\n{oracle}"


def fuzz(seed: int, num_steps: int, steps_per_episode: int = 150) -> Totals:
    """Episodes until so many steps were made. A failure names the episode's seed."""
    totals = Totals()
    while totals.steps < num_steps:
        episode_seed = seed * 1_000_003 + totals.episodes
        episode = Episode(episode_seed)
        try:
            episode.run(steps_per_episode)
        except Exception as error:
            raise AssertionError(f"episode seed {episode_seed}: {error}") from error
        stats = episode.cluster.scheduler.stats()
        totals.episodes += 1
        totals.steps += stats.steps
        totals.requests += len(episode.cluster.requests)
        totals.add(stats)
        totals.add_transfers(episode.transfers)
        for sample in episode.cluster.samples.values():
            reason = str(sample.finish_reason)
            totals.finished[reason] = totals.finished.get(reason, 0) + 1
    return totals
