"""The second tier at work: swaps sequences out and back, keeps evicted content, loads it again.

Knows the pools of both tiers and the copies between them; decides which blocks move, never who
must go. One mechanism serves swap and cache: a swapped sequence's published blocks are host
cache, held by it; its unpublished ones are host blocks that only it knows.

    device ──STORE──► host     swap-out; the cleaner, ahead of eviction
    device ◄──LOAD─── host     swap-in; a prefix hit on the host
               IMPORT► host     blocks from another replica, that each rank has staged

Both ends of a copy stay pinned until it has ended. Who shares a load waits for the one load.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from .block_pool import BlockPool
from .config import SchedulerConfig
from .content import Content, Tier
from .costs import CostModel
from .host_pool import HostPool, Lookup
from .integrity import check
from .output import CopyDone, CopyJob, CopyKind
from .request import Sequence, SwappedBlock, SwappedTable
from .running_batch import RunningBatch


@dataclass(frozen=True, slots=True)
class Move:
    """One block of a copy. content: None where the block is known to its owner alone;
    content_id: its id when the copy began."""

    device_block: int
    host_block: int
    content: Content | None
    content_id: int


OnEnd = Callable[[bool], None]


@dataclass(slots=True, eq=False)
class _OpenJob:
    """waiters: sequences that cannot go on before it ends. watchers: told whether it succeeded."""

    kind: CopyKind
    moves: list[Move]
    is_cleaning: bool = False
    waiters: list[Sequence] = field(default_factory=list[Sequence])
    watchers: list[OnEnd] = field(default_factory=list[OnEnd])


class HostTier:
    """Copies between the tiers and what they are for."""

    def __init__(
        self,
        config: SchedulerConfig,
        batch: RunningBatch,
        device: BlockPool,
        host: HostPool,
        costs: CostModel,
    ) -> None:
        self._batch = batch
        self._device = device
        self._host = host
        self._costs = costs
        # No more than half of the host, or what is kept ahead would drive itself out.
        self._write_back_blocks = min(config.write_back_blocks, host.num_blocks // 2)
        self._jobs: dict[int, _OpenJob] = {}
        self._storing: dict[int, _OpenJob] = {}  # by content id
        self._loading: dict[int, tuple[int, _OpenJob]] = {}  # content id → device block, job
        self._unlaunched: list[CopyJob] = []
        self._num_jobs = 0
        self.num_stored = self.num_loaded = self.num_failed = 0

    @property
    def is_busy(self) -> bool:
        """Whether any copy is open."""
        return bool(self._jobs)

    def take_jobs(self) -> list[CopyJob]:
        """Copies to be started with the step being planned."""
        jobs, self._unlaunched = self._unlaunched, []
        return jobs

    # ── lookups ───────────────────────────────────────────────────────────────────────────

    def arriving(self, content: Content) -> int | None:
        """The device block into which the content is being loaded."""
        found = self._loading.get(content.id)
        return None if found is None else found[0]

    # ── swap ──────────────────────────────────────────────────────────────────────────────

    def swap_out(self, sequence: Sequence, blocks: list[int], num_computed: int) -> bool:
        """Store what a sequence has computed; its table may be given back at once, the copies
        hold their sources. False: no room on the host, nothing has changed."""
        contents = [self._device.content(block) for block in blocks]
        kept = self._keep([*blocks], contents)
        if kept is None:
            return False
        host_blocks, jobs = kept
        entries = [
            SwappedBlock(host_block, content, 0 if content is None else content.id)
            for host_block, content in zip(host_blocks, contents, strict=True)
        ]
        sequence.swapped = SwappedTable(entries, num_computed)
        for job in jobs:
            self._wait(sequence, job)
        return True

    def drop(self, sequence: Sequence) -> None:
        """The sequence needs neither its swapped blocks nor any copy any more."""
        if sequence.num_open_copies:
            for job in self._jobs.values():
                if sequence in job.waiters:
                    job.waiters.remove(sequence)
            sequence.num_open_copies = 0
        self.release_swapped(sequence)

    def release_swapped(self, sequence: Sequence) -> None:
        """The sequence does not hold host blocks any more; open copies hold their own."""
        if sequence.swapped is not None:
            self._host.release([entry.host_block for entry in sequence.swapped.blocks])
            sequence.swapped = None

    # ── other replicas ────────────────────────────────────────────────────────────────────

    def hold(self, contents: list[Content]) -> list[int] | None:
        """A host block for each content, referenced for the caller, and stored first where it is
        only on the device. None: no room, nothing has changed."""
        kept = self._keep([content.blocks[Tier.DEVICE] for content in contents], list(contents))
        return None if kept is None else kept[0]

    def watch(self, contents: list[Content], on_end: OnEnd) -> int:
        """Tell when the stores end that fill host blocks with these. Returns how many there are."""
        jobs = {id(job): job for c in contents if (job := self._storing.get(c.id)) is not None}
        for job in jobs.values():
            job.watchers.append(on_end)
        return len(jobs)

    def bring_in(self, staging: int, first: int, host_blocks: list[int], on_end: OnEnd) -> None:
        """Copy what each rank has staged, from its block number `first` on, to the host blocks,
        which the caller holds until it is told the end."""
        self._num_jobs += 1
        self._jobs[self._num_jobs] = _OpenJob(CopyKind.IMPORT, [], watchers=[on_end])
        sources = np.arange(first, first + len(host_blocks), dtype=np.int32)
        targets = np.array(host_blocks, dtype=np.int32)
        job = CopyJob(self._num_jobs, CopyKind.IMPORT, sources, targets, staging)
        self._unlaunched.append(job)

    # ── loads ─────────────────────────────────────────────────────────────────────────────

    def load(self, sequence: Sequence, moves: list[Move], shared: Iterable[Content]) -> None:
        """Bring blocks to the device for a sequence that has just got a row, and wait for
        those that others are loading already."""
        for content in shared:
            _, job = self._loading[content.id]
            if sequence not in job.waiters:
                self._wait(sequence, job)
        if moves:
            self._wait(sequence, self._start(CopyKind.LOAD, moves))
        if sequence.num_open_copies and sequence.row is not None:
            self._batch.set_loading(sequence.row, True)

    # ── the cleaner ───────────────────────────────────────────────────────────────────────

    def write_back(self) -> None:
        """Copy the blocks whose eviction is near, so that they are dropped without loss."""
        room = self._write_back_blocks - self._device.num_clean
        if room <= 0 or any(job.is_cleaning for job in self._jobs.values()):
            return
        # No more than half of what is free: what is being copied cannot be allocated.
        count = min(self._write_back_blocks, self._device.num_free // 2)
        moves: list[Move] = []
        for block in self._device.next_evicted(count):
            content = self._device.content(block)
            if content is None or self._host.lookup(content) is not Lookup.MISS:
                continue
            targets = self._host.begin_stores([content])
            if targets is None:
                break
            moves.append(Move(block, targets[0], content, content.id))
        if moves:
            self._start(CopyKind.STORE, moves).is_cleaning = True

    # ── copies end ────────────────────────────────────────────────────────────────────────

    def finish(self, done: CopyDone) -> list[Sequence]:
        """A copy has ended. Returns the sequences that must compute again because it failed."""
        job = self._jobs.pop(done.job_id)
        if job.moves:
            self._costs.observe_copy(len(job.moves), done.elapsed_s)
        self.num_failed += not done.ok
        if job.kind is CopyKind.STORE:
            self._end_store(job, done.ok)
        elif job.kind is CopyKind.LOAD:
            self._end_load(job, done.ok)
        for on_end in job.watchers:
            on_end(done.ok)
        for sequence in job.waiters:
            sequence.num_open_copies -= 1
            if not sequence.num_open_copies and sequence.row is not None:
                self._batch.set_loading(sequence.row, False)
        return [] if done.ok else job.waiters

    def cleaning_blocks(self) -> Iterable[int]:
        """Host blocks that the cleaner holds while it copies, once each."""
        for job in self._jobs.values():
            if job.is_cleaning:
                yield from (move.host_block for move in job.moves)

    def check_integrity(self) -> None:
        """Whoever waits for a copy counts it, and what is being copied is pinned."""
        waiting: dict[Sequence, int] = {}
        for job in self._jobs.values():
            for sequence in job.waiters:
                waiting[sequence] = waiting.get(sequence, 0) + 1
        for sequence, count in waiting.items():
            check(
                sequence.num_open_copies == count,
                f"{sequence} waits for {count} copies and counts {sequence.num_open_copies}",
            )
        for content_id, (block, job) in self._loading.items():
            check(
                any(m.device_block == block and m.content_id == content_id for m in job.moves),
                f"content {content_id} is not loaded into block {block}",
            )

    def _keep(
        self, device_blocks: list[int | None], contents: list[Content | None]
    ) -> tuple[list[int], list[_OpenJob]] | None:
        """A referenced host block for each, and the copies that fill them; a content that is on
        the host already need not be on the device. None: no room, nothing has changed."""
        known = [c for c in contents if c is not None and self._host.lookup(c) is not Lookup.MISS]
        kept = [self._host.block_of(content) for content in known]
        self._host.reference(kept)  # before room is made, which might evict them
        missing = [
            place
            for place, content in enumerate(contents)
            if content is None or self._host.lookup(content) is Lookup.MISS
        ]
        targets = self._host.begin_stores([contents[place] for place in missing])
        if targets is None:
            self._host.release(kept)
            return None
        waits = {id(job): job for c in known if (job := self._storing.get(c.id)) is not None}
        placed = dict(zip(missing, targets, strict=True))
        moves: list[Move] = []
        for place, target in placed.items():
            content, block = contents[place], device_blocks[place]
            assert block is not None, f"{content} is on neither tier"
            moves.append(Move(block, target, content, 0 if content is None else content.id))
        if moves:
            job = self._start(CopyKind.STORE, moves)
            waits[id(job)] = job
        host_blocks = [
            placed[place] if place in placed else self._host.block_of(_known(content))
            for place, content in enumerate(contents)
        ]
        return host_blocks, list(waits.values())

    def _start(self, kind: CopyKind, moves: list[Move]) -> _OpenJob:
        self._num_jobs += 1
        job = self._jobs[self._num_jobs] = _OpenJob(kind, moves)
        device = np.array([move.device_block for move in moves], dtype=np.int32)
        host = np.array([move.host_block for move in moves], dtype=np.int32)
        is_store = kind is CopyKind.STORE
        sources, targets = (device, host) if is_store else (host, device)
        self._unlaunched.append(CopyJob(self._num_jobs, kind, sources, targets))
        for move in moves:
            self._device.pin(move.device_block)
            if not is_store:
                self._host.begin_load(move.host_block)
            if move.content is not None:
                if is_store:
                    self._storing[move.content_id] = job
                else:
                    self._loading[move.content_id] = move.device_block, job
        return job

    def _wait(self, sequence: Sequence, job: _OpenJob) -> None:
        job.waiters.append(sequence)
        sequence.num_open_copies += 1

    def _end_store(self, job: _OpenJob, ok: bool) -> None:
        self.num_stored += len(job.moves) * ok
        for move in job.moves:
            if move.content is not None:
                del self._storing[move.content_id]
            self._host.end_store(move.host_block, move.content, move.content_id, ok)
            self._device.unpin(move.device_block, evict_first=job.is_cleaning)
            if job.is_cleaning:
                self._host.release([move.host_block])

    def _end_load(self, job: _OpenJob, ok: bool) -> None:
        self.num_loaded += len(job.moves) * ok
        for move in job.moves:
            content = move.content
            if content is not None:
                del self._loading[move.content_id]
                if ok and content.id == move.content_id:
                    self._device.adopt(move.device_block, content)
            self._host.end_load(move.host_block, ok)
            self._device.unpin(move.device_block)


def _known(content: Content | None) -> Content:
    assert content is not None, "a block that only its owner knows cannot be on the host already"
    return content
