"""A decoder described by data: all that the decoder's code branches on. Values only.

How a checkpoint's `config.json` becomes one is `families`.
"""

from dataclasses import dataclass
from enum import StrEnum


class ModelError(Exception):
    """The model cannot be served as it stands; the message names the file and the field."""


class UnsupportedModel(ModelError):
    """An architecture or a feature that the decoder does not have."""


class CheckpointError(ModelError):
    """A file or tensor is missing, damaged, or not what the configuration says."""


class RopeKind(StrEnum):
    """How rotary frequencies are stretched beyond the length a model was trained on."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    LONGROPE = "longrope"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base and scaling.

    rotary_fraction: of a head's dimensions, the first that are rotated.
    LLAMA3 reads factor, the two frequency factors and original_max_position.
    LONGROPE divides each frequency by short_factors (contexts up to original_max_position) or
    long_factors (longer ones), and multiplies cosines and sines by magnitude.
    """

    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    rotary_fraction: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    magnitude: float = 1.0


class Activation(StrEnum):
    """Of a gated MLP, by its name in checkpoints."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


class QkNorm(StrEnum):
    """What an RMS norm of queries and keys, before their rotation, runs over."""

    HEAD = "each head"
    ALL_HEADS = "all heads together"


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer.

    rope: None = no rotary embedding. window: how many keys a query sees, its own included;
    None = all. has_experts: a mixture of experts stands where a dense layer has its MLP.
    """

    rope: RopeConfig | None
    window: int | None = None
    has_experts: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts: the router's best `num_active` of `num_experts`, weighted.

    normalise: the weights of the chosen add up to 1. Experts [begin, end) are on this rank.
    """

    num_experts: int
    num_active: int
    intermediate_size: int
    normalise: bool
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Where a checkpoint's names differ from Llama's.

    fused: q, k and v are one tensor, `qkv_proj`, gate and up another, `gate_up_proj`.
    experts: what stands for `mlp` in layers with experts; expert_linears: for gate_proj, up_proj
    and down_proj in an expert.
    """

    fused: bool = False
    experts: str = "mlp"
    expert_linears: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder, or one rank's part of it.

    intermediate_size: width of the gated MLP of dense layers.
    attention_bias: on q, k, v; attention_output_bias: on the projection back.
    attention_scale: of products of queries and keys.
    norm_offset: added to the weights of every norm.
    post_norms: attention's and the MLP's outputs are normalised before they are added.
    qkv_clip: q, k and v are limited to [-qkv_clip, qkv_clip].
    embedding_scale, residual_scale (of what attention and MLP add), logits_scale: factors.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerConfig, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    tie_word_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    attention_scale: float
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    activation: Activation = Activation.SILU
    experts: ExpertsConfig | None = None
    qk_norm: QkNorm | None = None
    qkv_clip: float | None = None
    norm_offset: float = 0.0
    post_norms: bool = False
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    names: TensorNames = TensorNames()

    @property
    def num_layers(self) -> int:
        """How many layers."""
        return len(self.layers)

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    def block_bytes(self, block_size: int, element_size: int) -> int:
        """Bytes of one block over all layers, K and V."""
        return self.num_layers * 2 * block_size * self.kv_size * element_size
