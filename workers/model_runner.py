"""One rank's model: obeys `SchedulerOutput` step by step, decides nothing.

Owns the weights, the block pools' tensors and the input batch. Knows no request and no lease; of
other ranks only that sums and logits are made with them. The leader alone chooses tokens: the
others are told in the next step, by `append_sampled`.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateImportUsage=false

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed import TCPStore

from ..kernels.backend import GraphBackend, KernelBackend
from ..kernels.metadata import AttentionMetadata, HostLayout
from ..protos.messages import SamplingParams, TokenLogprobs
from ..scheduler.output import (
    CopyDone,
    Int32Array,
    ModelRunnerOutput,
    NewRow,
    SchedulerOutput,
)
from .block_storage import BlockLayout, BlockStorage
from .config import WorkerConfig
from .cuda_graphs import Capture, CudaCapture, DecodeGraphs, GraphSettings, graph_sizes
from .device_profile import LargestStep, profile_device, read_device
from .drafts import DraftSamples
from .grammar import GrammarTokenizer
from .input_batch import InputBatch, StepLayout
from .loaded_model import LoadedModel, ModelInfo, load_model, pick_device
from .loader import Progress
from .memory import (
    PROMPT_LOGITS_BYTES,
    DeviceProfile,
    DeviceReading,
    MemoryPartition,
    check_free,
    plan_memory,
)
from .models.config import DecoderConfig, ModelError
from .models.decoder import Decoder
from .promised_tokens import Promise
from .rank_spec import RankSpec, Transport
from .rendezvous import RankGroups, connect, single_rank
from .sampler import Sampler, Samples, SamplesInFlight, token_logprobs
from .upload import upload
from .wanted_rows import PromptReport, WantedRows, prompt_reports

logger = logging.getLogger(__name__)

_KV_DTYPES = {"fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """What this machine does with this model."""

    prefill_tokens_per_s: float
    decode_step_s: float


@dataclass(slots=True)
class LaunchedStep:
    """A step from its launch to its result.

    is_ahead: it is finished after the next one has been launched, perhaps.
    reports, reported_hidden: prompt positions whose log-probabilities were asked for, and the
    hidden states that give them. settled: once its tokens are known.
    """

    output: SchedulerOutput
    started: float
    is_ahead: bool
    samples: SamplesInFlight | None = None
    promise: Promise | None = None
    reports: list[PromptReport] = field(default_factory=list[PromptReport])
    reported_hidden: Tensor | None = None
    settled: Samples | None = None


class ModelRunner:
    """Runs steps. All calls come from one thread, one after the other."""

    def __init__(
        self,
        config: WorkerConfig,
        model_info: ModelInfo,
        decoder: Decoder,
        storage: BlockStorage,
        partition: MemoryPartition,
        device: torch.device,
        ranks: RankGroups | None = None,
    ) -> None:
        self.config = config
        self.ranks = ranks or single_rank()
        self.model_info = model_info
        self.partition = partition
        self.storage = storage
        self.batch = InputBatch(
            config.max_num_sequences,
            model_info.max_context,
            config.block_size,
            device,
            model_info.eos_token_ids,
        )
        self.decoder = decoder
        vocabulary = Path(model_info.tokenizer_dir) / "tokenizer.json"
        self._sampler = Sampler(
            self.batch,
            GrammarTokenizer(vocabulary, model_info.vocab_size, model_info.eos_token_ids),
            decoder.backend.filtered_weights,
        )
        self._device = device
        self._graphs: DecodeGraphs | None = None
        self._in_flight: LaunchedStep | None = None  # the last one launched
        self._last_ended = 0.0

    @classmethod
    def load(
        cls,
        config: WorkerConfig,
        spec: RankSpec | None = None,
        store: TCPStore | None = None,
        progress: Progress | None = None,
    ) -> "ModelRunner":
        """Load the weights, then give the KV pool what the configuration allows.

        With other ranks (spec, store: see `rendezvous.connect`) each reads its own slices, and all
        pools get the size of the smallest. progress: told of each tensor read.
        """
        spec = spec or RankSpec()
        with ExitStack() as on_failure:
            ranks = connect(spec, pick_device(config.device), store)
            on_failure.callback(ranks.close)  # the others should not wait for this rank
            runner = cls._load(config, ranks, spec, progress)
            on_failure.pop_all()
        return runner

    @classmethod
    def _load(
        cls, config: WorkerConfig, ranks: RankGroups, spec: RankSpec, progress: Progress | None
    ) -> "ModelRunner":
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        device = pick_device(config.device)
        start = None
        if device.type == "cuda":
            torch.cuda.set_device(device)  # what is compiled is launched on the current one
            start = read_device(device)
        loaded = load_model(config, spec, ranks, device, progress)
        ranks.messages.barrier(spec.start_timeout_s)  # disks differ in speed
        decoder = loaded.decoder
        kv_dtype = _KV_DTYPES.get(config.kv_dtype, loaded.dtype)
        layout = BlockLayout.of(loaded.shard, config.block_size, kv_dtype)
        sizes = _graph_sizes(config, loaded.shard, decoder.backend, device)
        profile = None
        if start is not None and not config.names_pool_size:
            profile = _profile(config, loaded, layout, len(sizes), start, device)
        partition = _divide_memory(config, loaded, layout, spec, profile, device)
        partition = partition.limited(*ranks.minimum(partition.sizes))
        takes_memory = device.type == "cpu" and config.names_pool_size
        if takes_memory:
            check_free(partition.kv_pool)
        storage = BlockStorage(
            layout,
            partition.num_blocks,
            partition.num_host_blocks,
            device,
            decoder.backend,
            config.faults,
            has_null_block=bool(sizes),
        )
        if takes_memory:
            storage.take_memory()
        info = loaded.info(layout.dtype)
        _check_same_model(ranks, info.fingerprint)
        runner = cls(config, info, decoder, storage, partition, device, ranks)
        if sizes:
            runner.record_decodes(sizes, CudaCapture(device))
        return runner

    def record_decodes(self, sizes: tuple[int, ...], capture: Capture) -> None:
        """From now on steps that only decode are replayed. The storage has a null block; `capture`
        decides what a recording is. All ranks do it together."""
        backend, null_block = self.decoder.backend, self.storage.null_block
        assert null_block is not None, "padded rows have no block to be written to"
        settings = GraphSettings(
            sizes,
            self.config.block_size,
            max_blocks=self.batch.block_tables.shape[1],
            null_block=null_block,
            device=self._device,
        )
        started = time.perf_counter()
        plan = backend.plan_graph if isinstance(backend, GraphBackend) else _plan_nothing
        self._graphs = DecodeGraphs(settings, self._forward_all, plan, capture)
        logger.info(
            "recorded decode steps of %d sizes in %.1f s", len(sizes), time.perf_counter() - started
        )

    @torch.inference_mode()
    def _forward_all(self, token_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
        return self.decoder.forward(token_ids, self.storage.layers, metadata, None)

    @property
    def device(self) -> torch.device:
        """Where the weights and the pool are."""
        return self._device

    @property
    def num_blocks(self) -> int:
        """Blocks of the device pool."""
        return self.storage.num_blocks

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host pool."""
        return self.storage.num_host_blocks

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One step, in the order that `SchedulerOutput` promises."""
        return self.finish(self._begin(output, is_ahead=False))

    def launch(self, output: SchedulerOutput) -> "LaunchedStep":
        """Begin a step; one more may be in flight. On a GPU this returns while it runs, and what
        the step before has chosen is taken from the device."""
        return self._begin(output, is_ahead=True)

    @torch.inference_mode()
    def _begin(self, output: SchedulerOutput, is_ahead: bool) -> "LaunchedStep":
        started = time.perf_counter()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has a current device of its own
        self.batch.apply(output)
        self.storage.take_fresh(output)
        self.storage.copy_on_write(output.device_copies)
        self.storage.submit(output.copy_jobs)
        step = LaunchedStep(output, started, is_ahead)
        if len(output.rows) > 0:
            self._compute(step)
        self._in_flight = step
        return step

    def finish(self, step: "LaunchedStep") -> ModelRunnerOutput:
        """Wait for a step, the oldest first. Nothing that was launched after it is waited for."""
        output, samples = step.output, self._settle(step)
        if step is self._in_flight:
            self._in_flight = None
        prompt_logprobs = self._prompt_logprobs(step) if step.reports else {}
        self.storage.check_guard()
        ended = time.perf_counter()
        began, self._last_ended = max(step.started, self._last_ended), ended
        return ModelRunnerOutput(
            step=output.step,
            token_ids=samples.token_ids,
            logprobs=samples.logprobs,
            prompt_logprobs=prompt_logprobs,
            beam_candidates=samples.candidates,
            copies_done=self.storage.poll(),
            failed_rows=tuple(int(output.sample_rows[entry]) for entry in samples.failed),
            elapsed_s=ended - began if len(output.rows) > 0 else 0.0,
        )

    def poll_copies(self) -> tuple[CopyDone, ...]:
        """Copies between the tiers that ended since the last step or poll."""
        return self.storage.poll()

    def append_sampled(self, output: SchedulerOutput, token_ids: Int32Array) -> None:
        """On ranks other than the leader: what it chose in the step that was executed last."""
        drafts = DraftSamples.of(output)
        offsets = None if drafts is None else drafts.offsets
        self.batch.append_tokens(output.sample_rows, token_ids, offsets)

    def close(self) -> None:
        """Stop the copy thread and leave the other ranks."""
        self.storage.close()
        self.ranks.close()

    def measure(
        self,
        num_decodes: int = 3,
        execute: Callable[[SchedulerOutput], ModelRunnerOutput] | None = None,
    ) -> MeasuredSpeed:
        """Time a prefill and some decode steps on an idle runner; leaves junk in its blocks.

        execute: what runs a step on all ranks; None = there is only this one.
        """
        execute = execute or self.execute
        block_size, max_context = self.config.block_size, self.model_info.max_context
        room = min(max_context, self.num_blocks * block_size) - num_decodes - 2
        num_tokens = max(1, min(self.config.max_num_batched_tokens, 256, room))
        new = NewRow(
            row=0,
            sequence_id=0,
            token_ids=np.zeros(num_tokens, dtype=np.int32),
            num_prompt_tokens=num_tokens,
            block_table=np.arange(
                min(self.num_blocks, -(-(num_tokens + num_decodes + 2) // block_size)),
                dtype=np.int32,
            ),
            sampling=SamplingParams(temperature=0.0),
            sample_index=0,
        )
        prefill_s = min(execute(_one_row_step(0, num_tokens, (new,))).elapsed_s for _ in range(2))
        decode_s = [
            execute(_one_row_step(num_tokens + index, 1, ())).elapsed_s
            for index in range(min(num_decodes, max(0, room)))
        ]
        execute(SchedulerOutput(step=0, removed_rows=np.zeros(1, dtype=np.int32)))
        return MeasuredSpeed(num_tokens / prefill_s, min(decode_s, default=prefill_s))

    def _compute(self, step: "LaunchedStep") -> None:
        output = step.output
        layout = self.batch.lay_out(output)
        step.reports = prompt_reports(output, self.batch)
        drafts = DraftSamples.of(output)
        wanted = WantedRows.of(output, step.reports, drafts, layout.is_decode)
        hidden = self._forward(layout, wanted)
        if step.reports:
            step.reported_hidden = hidden[wanted.num_sampled :]
        if len(output.sample_rows) > 0:
            self._sample(step, hidden, wanted, drafts)

    def _forward(self, layout: StepLayout, wanted: WantedRows) -> Tensor:
        """Hidden states of the wanted rows."""
        rows = None
        if not wanted.is_everything(len(layout.token_ids)):
            rows = upload(wanted.rows, self._device)
        if self._graphs is not None and self._graphs.holds(layout):
            hidden = self._graphs.run(layout)
            return hidden if rows is None else hidden[rows]
        step = self.batch.on_device(layout)
        return self.decoder.forward(step.token_ids, self.storage.layers, step.metadata, rows)

    def _sample(
        self, step: "LaunchedStep", hidden: Tensor, wanted: WantedRows, drafts: DraftSamples | None
    ) -> None:
        """Choose a token for each of `sample_rows`, and promise it there."""
        rows = step.output.sample_rows
        logits = self.decoder.logits(hidden[: wanted.num_sampled])
        if logits is None:
            return
        if wanted.expand is not None:
            logits = logits[upload(wanted.expand, self._device)]
        if self._in_flight is not None and self.batch.needs_unknown_tokens(rows):
            self._settle(self._in_flight)
        step.samples = self._sampler.launch(logits, rows, drafts)
        if step.is_ahead:
            step.promise = self.batch.promise(step.output, step.samples.token_ids, drafts)
        else:
            step.settled = step.samples.result()
            offsets = None if drafts is None else drafts.offsets
            self.batch.append_tokens(rows, step.settled.token_ids, offsets)

    def _settle(self, step: "LaunchedStep") -> Samples:
        """Wait for a step's tokens and let the rows have them, once."""
        if step.settled is None:
            step.settled = Samples(np.empty(0, dtype=np.int32))
            if step.samples is not None and step.promise is not None:
                step.settled = step.samples.result()
                self.batch.keep(step.promise, step.settled.token_ids)
        return step.settled

    @torch.inference_mode()
    def _prompt_logprobs(self, step: "LaunchedStep") -> dict[int, tuple[TokenLogprobs | None, ...]]:
        """Entries for prompt positions first+1 .. first+length of each report, in chunks, so that
        tokens x vocabulary never stands in memory; position 0 has no context: None."""
        chunk = max(1, PROMPT_LOGITS_BYTES // (4 * self.model_info.vocab_size))
        found: dict[int, tuple[TokenLogprobs | None, ...]] = {}
        begin, hidden = 0, step.reported_hidden
        assert hidden is not None, f"step {step.output.step} reports on nothing"
        for report in step.reports:
            entries: list[TokenLogprobs | None] = [None] if report.first == 0 else []
            first = report.first + 1
            tokens = self.batch.tokens[report.row, first : first + report.length].astype(np.int64)
            token_ids = torch.from_numpy(tokens).to(self._device)
            for at in range(0, report.length, chunk):
                end = min(at + chunk, report.length)
                logits = self.decoder.logits(hidden[begin + at : begin + end])
                if logits is None:
                    continue
                counts = [report.num_best] * (end - at)
                entries.extend(token_logprobs(logits, token_ids[at:end], counts))
            begin += report.length
            found[report.row] = tuple(entries)
        return found


def _one_row_step(first: int, count: int, new_rows: tuple[NewRow, ...]) -> SchedulerOutput:
    """Compute `count` tokens of row 0 from position `first`, and sample."""
    zero = np.zeros(1, dtype=np.int32)
    return SchedulerOutput(
        step=0,
        rows=zero,
        num_scheduled_tokens=zero + count,
        num_computed_tokens=zero + first,
        sample_entries=zero,
        sample_rows=zero,
        new_rows=new_rows,
    )


def _profile(
    config: WorkerConfig,
    loaded: LoadedModel,
    layout: BlockLayout,
    num_graphs: int,
    start: DeviceReading,
    device: torch.device,
) -> DeviceProfile:
    largest = LargestStep(
        config.max_num_batched_tokens,
        config.max_num_sequences,
        loaded.max_context,
        loaded.model.vocab_size,
        num_graphs,
    )
    profile = profile_device(start, loaded.decoder, layout, largest, device)
    logger.info("GPU: %s", profile.text)
    return profile


def _divide_memory(
    config: WorkerConfig,
    loaded: LoadedModel,
    layout: BlockLayout,
    spec: RankSpec,
    profile: DeviceProfile | None,
    device: torch.device,
) -> MemoryPartition:
    # Logits are whole on the leader; all else is the rank's part.
    sized = replace(loaded.shard, vocab_size=loaded.model.vocab_size)
    return plan_memory(
        config,
        sized,
        loaded.max_context,
        device,
        loaded.num_bytes,
        loaded.dtype.itemsize,
        spec.world_size if spec.transport is Transport.SHARED_MEMORY else 1,
        layout.dtype.itemsize,
        profile,
    )


def _check_same_model(ranks: RankGroups, fingerprint: str) -> None:
    """Ranks on several hosts each have their own copy of the folder."""
    leader_has = ranks.messages.broadcast(fingerprint.encode() if ranks.rank == 0 else None)
    if leader_has.decode() != fingerprint:
        raise ModelError(f"rank {ranks.rank} has loaded another model than the leader")


def _graph_sizes(
    config: WorkerConfig, model: DecoderConfig, backend: KernelBackend, device: torch.device
) -> tuple[int, ...]:
    """Which decode steps are recorded; none where nothing can be. Experts are not: how many tokens
    each gets is asked of the device."""
    can_record = isinstance(backend, GraphBackend) and model.experts is None
    if device.type != "cuda" or config.enforce_eager or not can_record:
        return ()
    return graph_sizes(config.max_num_sequences)


def _plan_nothing(metadata: AttentionMetadata, host: HostLayout, max_num_pages: int) -> None:
    """For a backend that works nothing out on the host."""
