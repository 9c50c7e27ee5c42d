"""What a rank takes of its GPU beside KV blocks, found by running the greatest step there can be.

Knows how a step of that size is made up: every token that a step may have, all at the longest
context, logits and log-probabilities of as many rows as the batch has. What is made of the numbers
is `memory`'s.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateImportUsage=false

import gc
from dataclasses import dataclass

import numpy as np
import torch

from ..kernels import sampling as kernels
from ..kernels.metadata import AttentionMetadata, HostLayout
from .block_storage import BlockLayout
from .cuda_graphs import GRAPH_BYTES
from .input_batch import StepLayout
from .memory import PROMPT_LOGITS_BYTES, DeviceProfile, DeviceReading
from .models.decoder import Decoder
from .upload import upload

_NUM_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class LargestStep:
    """Its measures. num_graphs: recordings that will be made."""

    num_tokens: int
    num_sequences: int
    max_context: int
    vocab_size: int
    num_graphs: int = 0


def read_device(device: torch.device) -> DeviceReading:
    """What it says now. Makes the process's CUDA context where there was none, which then counts
    as someone else's."""
    free, total = torch.cuda.mem_get_info(device)
    return DeviceReading(
        free=free,
        total=total,
        allocated=torch.cuda.memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
        peak=torch.cuda.max_memory_allocated(device),
    )


def profile_device(
    start: DeviceReading,
    decoder: Decoder,
    layout: BlockLayout,
    step: LargestStep,
    device: torch.device,
) -> DeviceProfile:
    """Runs the step. start: read before this rank took anything. All ranks call it together."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    loaded = read_device(device)
    run_largest_step(decoder, layout, step, device)
    torch.cuda.synchronize(device)
    stepped = read_device(device)
    torch.cuda.empty_cache()
    return DeviceProfile(start, loaded, stepped, step.num_graphs * GRAPH_BYTES)


@torch.inference_mode()
def run_largest_step(
    decoder: Decoder, layout: BlockLayout, step: LargestStep, device: torch.device
) -> None:
    """Compute it over a pool of one block, which stands for every block: what it says is junk."""
    pool = torch.zeros((1, *layout.shape), device=device).to(layout.dtype)
    layers = [pool[:, index] for index in range(layout.num_layers)]
    laid_out = lay_out_largest(step, layout.block_size)
    attention = laid_out.attention
    metadata = AttentionMetadata(
        query_starts=upload(attention.query_starts, device),
        context_lens=upload(attention.context_lens, device),
        block_tables=upload(attention.block_tables, device),
        positions=upload(laid_out.positions, device),
        slots=upload(laid_out.slots, device),
        num_decodes=0,
        max_query_len=laid_out.max_query_len,
        max_context_len=int(attention.context_lens.max()),
        host=attention,
    )
    hidden = decoder.forward(upload(laid_out.token_ids, device), layers, metadata, None)
    num_rows = min(step.num_sequences, step.num_tokens)
    logits = decoder.logits(hidden[:num_rows])
    if logits is not None:
        raw = logits.clone()  # kept where log-probabilities are asked for
        best, _ = kernels.greedy(logits)
        _draw(decoder, logits)
        kernels.logprobs(raw, best, min(_NUM_LOGPROBS, step.vocab_size))
    num_reported = min(step.num_tokens, max(1, PROMPT_LOGITS_BYTES // (4 * step.vocab_size)))
    logits = decoder.logits(hidden[:num_reported])
    if logits is not None:
        best, _ = kernels.greedy(logits)
        kernels.logprobs(logits, best, min(_NUM_LOGPROBS, step.vocab_size))


def lay_out_largest(step: LargestStep, block_size: int) -> StepLayout:
    """Prompts of the longest context, the last one shorter, all in block 0."""
    whole, rest = divmod(step.num_tokens, step.max_context)
    lens = np.array([step.max_context] * whole + [rest] * (rest > 0), dtype=np.int32)
    starts = np.zeros(len(lens) + 1, dtype=np.int32)
    np.cumsum(lens, out=starts[1:])
    positions = np.concatenate([np.arange(length, dtype=np.int64) for length in lens])
    tables = np.zeros((len(lens), -(-int(lens.max()) // block_size)), dtype=np.int32)
    return StepLayout(
        token_ids=np.zeros(step.num_tokens, dtype=np.int64),
        positions=positions,
        slots=positions % block_size,
        attention=HostLayout(starts, lens, tables),
        num_decodes=0,
        max_query_len=int(lens.max()),
    )


def _draw(decoder: Decoder, logits: torch.Tensor) -> None:
    """With every filter that a row may have."""
    ones = torch.ones(len(logits), device=logits.device)
    params = kernels.DrawParams(
        temperature=ones,
        top_k=torch.full((len(logits),), 50, dtype=torch.int64, device=logits.device),
        top_p=ones * 0.9,
        min_p=ones * 0.01,
        uniforms=ones * 0.5,
    )
    kernels.sample(logits, params, decoder.backend.filtered_weights)
