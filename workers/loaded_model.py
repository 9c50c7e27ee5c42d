"""One rank's part of a model in memory: which kernels, in which dtype, which slices of the weights.

Knows the checkpoint and how many ranks share it. Knows no block, no step and no memory but the
weights'.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateImportUsage=false

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ..kernels.backend import KernelBackend
from ..kernels.cpu import CpuBackend
from ..kernels.select import BackendUnavailable, select_backend
from .config import WorkerConfig
from .heap import unfragmented_heap
from .loader import CheckpointSource, Progress, StoredWeights, open_model, resolve_folder
from .models.config import DecoderConfig, ModelError, UnsupportedModel
from .models.decoder import Decoder, VocabularyShard
from .models.tensor_names import stored_place
from .models.weights import load_weights
from .rank_spec import RankSpec
from .rendezvous import RankGroups
from .shard_plan import ShardError, ShardPlan
from .sharded_source import ShardedSource, local_config, plan_shards

_NARROW_DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What others must know of the loaded model. dtype: of its activations, as text; kv_dtype: of
    its KV cache."""

    fingerprint: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    max_context: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    tokenizer_dir: str
    kv_dtype: str


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """model: the whole of it; shard: this rank's part, whose weights take `num_bytes`. dtype: of
    activations."""

    model: DecoderConfig
    shard: DecoderConfig
    decoder: Decoder
    num_bytes: int
    dtype: torch.dtype
    max_context: int
    fingerprint: str
    folder: Path

    def info(self, kv_dtype: torch.dtype) -> ModelInfo:
        """What others must know, once it is known what the cache holds."""
        model = self.model
        return ModelInfo(
            fingerprint=self.fingerprint,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            bos_token_id=model.bos_token_id,
            max_context=self.max_context,
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=str(self.dtype).removeprefix("torch."),
            tokenizer_dir=str(self.folder),
            kv_dtype=str(kv_dtype).removeprefix("torch."),
        )


def load_model(
    config: WorkerConfig,
    spec: RankSpec,
    ranks: RankGroups,
    device: torch.device,
    progress: Progress | None,
) -> LoadedModel:
    """Read this rank's slices. progress: told of each tensor read."""
    folder = resolve_folder(config.model, config.revision)
    model, checkpoint = open_model(folder)
    max_context = _max_context(config, model)
    dtype = _dtype(config.dtype, checkpoint.dtype, device)
    backend = _backend(config, device, dtype)
    plan = _shard_plan(model, spec, folder)
    with unfragmented_heap():
        decoder, num_bytes = _load_decoder(
            config, model, plan, checkpoint, dtype, device, backend, ranks, progress
        )
    return LoadedModel(
        model,
        local_config(model, plan),
        decoder,
        num_bytes,
        dtype,
        max_context,
        checkpoint.fingerprint(),
        folder,
    )


def pick_device(name: str) -> torch.device:
    """A GPU with its number, which torch asks for where one becomes the current one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda:0" if name == "cuda" else name)


def _shard_plan(model: DecoderConfig, spec: RankSpec, folder: Path) -> ShardPlan:
    try:
        return plan_shards(model, spec.rank, spec.world_size)
    except ShardError as error:
        raise UnsupportedModel(f"{folder} over {spec.world_size} ranks: {error}") from error


def _backend(config: WorkerConfig, device: torch.device, dtype: torch.dtype) -> KernelBackend:
    weight_dtype = _NARROW_DTYPES.get(config.weight_dtype)
    try:
        backend = select_backend(device, dtype, config.deterministic, weight_dtype)
    except BackendUnavailable as error:
        raise ModelError(str(error)) from error
    if config.quantized_weights == "packed" and not isinstance(backend, CpuBackend):
        raise ModelError(
            f"quantized_weights packed: the kernels {backend.name!r} take float weights alone;"
            " use dequantized"
        )
    return backend


def _load_decoder(
    config: WorkerConfig,
    model: DecoderConfig,
    plan: ShardPlan,
    checkpoint: StoredWeights,
    dtype: torch.dtype,
    device: torch.device,
    backend: KernelBackend,
    ranks: RankGroups,
    progress: Progress | None,
) -> tuple[Decoder, int]:
    """The decoder of one rank, and the bytes of its weights."""
    place = partial(stored_place, model)
    keep_codes = config.quantized_weights != "dequantized" and isinstance(backend, CpuBackend)
    source = CheckpointSource(checkpoint, dtype, device, place, progress, keep_codes)
    vocabulary = None
    if plan.world_size > 1:
        vocabulary = VocabularyShard(plan.vocab, plan.vocab_sizes)
    shard = local_config(model, plan)
    with torch.inference_mode():
        sharded = ShardedSource(source, model, plan)
        weights = load_weights(shard, sharded, backend)
        max_context = _max_context(config, model)
        decoder = Decoder(shard, weights, backend, max_context, ranks.tensors, vocabulary)
    if model.tie_word_embeddings:
        checkpoint.ignore("lm_head.weight")
    checkpoint.check_all_used()
    checkpoint.forget_pages()
    return decoder, weights.num_bytes


def _dtype(name: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """On the CPU float32 unless told otherwise: half-width products are slower there."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    if device.type == "cpu" or stored == torch.float32:
        return torch.float32
    return torch.bfloat16


def _max_context(config: WorkerConfig, model: DecoderConfig) -> int:
    if config.max_context is None:
        return model.max_position
    if config.max_context > model.max_position:
        raise ModelError(
            f"max_context {config.max_context} exceeds the model's {model.max_position} positions"
        )
    return config.max_context
