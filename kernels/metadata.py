"""Where each token of a step stands in the paged cache: shared by every attention backend."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HostLayout:
    """The same step's layout in host memory, for backends that plan there: int32 arrays as in
    `AttentionMetadata`."""

    query_starts: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's layout. Sequences that decode (one query token) come first.

    query_starts: int32 [num_sequences + 1], where each sequence's tokens begin in the flat batch.
    context_lens: int32 [num_sequences], KV length after this step's tokens were written.
    block_tables: int32 [num_sequences, max_blocks], physical block ids; entries past a
        sequence's length are undefined and must not be read.
    positions: int64 [num_tokens], position of each token in its sequence.
    slots: int64 [num_tokens], block id * block_size + offset, where each token's K/V is written.
    num_decodes: how many leading sequences have exactly one query token.
    max_query_len, max_context_len: over all sequences.
    host: None = a backend that plans has to read the device first.
    """

    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    positions: Tensor
    slots: Tensor
    num_decodes: int
    max_query_len: int
    max_context_len: int
    host: HostLayout | None = None
