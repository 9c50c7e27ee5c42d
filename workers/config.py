"""A worker's settings: values only. Knows no model and no tensor."""

from dataclasses import dataclass, field

from ..scheduler.config import AdmissionRule, PreemptionMode, SchedulerConfig
from .faults import Faults
from .stream_tls import StreamTls

SPECULATIVE_METHODS = ("off", "ngram")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What one rank of a replica loads, and how much it may take.

    Sizes in bytes are each rank's own; the rank with room for the fewest blocks counts for all.

    model: a Hugging Face checkpoint folder, or a hub id (revision: its branch, tag or commit).
    weights_version: the cluster's number of these weights; higher ones replace lower ones.
    weights_ordered: they are not what the replica was made for: an update ordered them since.
    device: "auto" (a GPU where there is one), "cpu", "cuda", "cuda:1".
    dtype: "auto" (float32 on the CPU, else the checkpoint's), "float32", "bfloat16".
    weight_dtype: how linears are kept: "auto" (as dtype; by the compiled CPU kernels as bfloat16
        where that loses nothing), "bfloat16", or "int8" with a scale per output (those kernels
        alone); widened as they are read.
    quantized_weights: those of AWQ and GPTQ: "packed" as they are, "dequantized" to dtype, "auto"
        (packed where the kernels can).
    kv_dtype: of the KV cache: "auto" (as dtype) or "fp8" (e4m3: half the bytes of bfloat16, each
        key and value within a sixteenth; past 448 they are cut off).
    enforce_eager: on a GPU, record no decode steps as CUDA graphs.
    num_blocks, kv_memory (bytes), memory_fraction: the pool's size; the first that is set holds. On
        the CPU one of the first two is taken from the system at once, a fraction as it is used.
        memory_fraction: of the device's memory, weights and workspace included, on a GPU
        (None = 0.9); of the memory available once the weights are loaded, on the CPU (None = 0.25).
    host_memory: bytes of the second tier; 0 = none.
    max_context: None = the model's own; longer is refused.
    prefill_chunk: None = up to the step's budget.
    preemption_mode, admission_rule, watermark, max_num_waiting: what happens when blocks run out;
        see `SchedulerConfig`.
    speculative: "off", or "ngram": guess from what a sequence has said before, up to
        num_speculative_tokens ahead, where prompt_lookup_min to prompt_lookup_max of its last
        tokens stood before. Answers are the same, sooner where text repeats itself. Beams and
        outputs with a grammar are not guessed.
    deterministic: logits do not depend on batch, chunk or row count.
    num_threads: None = torch's default.
    overlap_steps: schedule a step while the one before it runs; None = on a GPU only, since on
        the CPU the scheduler would take its time from the same cores.
    stream_tls: of the streams that gateways open; None = plaintext.
    faults: what goes wrong on purpose, in tests.
    """

    model: str
    revision: str | None = None
    weights_version: int = 0
    weights_ordered: bool = False
    device: str = "auto"
    dtype: str = "auto"
    weight_dtype: str = "auto"
    quantized_weights: str = "auto"
    kv_dtype: str = "auto"
    enforce_eager: bool = False
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory: int | None = None
    memory_fraction: float | None = None
    host_memory: int = 0
    max_context: int | None = None
    max_num_sequences: int = 256
    max_num_batched_tokens: int = 2048
    prefill_chunk: int | None = None
    enable_prefix_caching: bool = True
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    admission_rule: AdmissionRule = AdmissionRule.KNOWN_LENGTH
    watermark: float = 0.01
    max_num_waiting: int | None = None
    speculative: str = "off"
    num_speculative_tokens: int = 5
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    deterministic: bool = False
    num_threads: int | None = None
    overlap_steps: bool | None = None
    stream_tls: StreamTls | None = None
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_sequences", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, is {getattr(self, name)}")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), is {self.watermark}")
        for name in (
            "num_blocks",
            "kv_memory",
            "max_context",
            "prefill_chunk",
            "max_num_waiting",
            "num_threads",
            "num_speculative_tokens",
        ):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, is {value}")
        if self.speculative not in SPECULATIVE_METHODS:
            raise ValueError(f"speculative must be off or ngram, is {self.speculative!r}")
        if self.memory_fraction is not None and not 0.0 < self.memory_fraction <= 1.0:
            raise ValueError(f"memory_fraction must be in (0, 1], is {self.memory_fraction}")
        if self.host_memory < 0:
            raise ValueError(f"host_memory must not be negative, is {self.host_memory}")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"dtype must be auto, float32 or bfloat16, is {self.dtype!r}")
        if self.kv_dtype not in ("auto", "fp8"):
            raise ValueError(f"kv_dtype must be auto or fp8, is {self.kv_dtype!r}")
        if self.weight_dtype not in ("auto", "bfloat16", "int8"):
            raise ValueError(f"weight_dtype must be auto, bfloat16 or int8: {self.weight_dtype!r}")
        if self.quantized_weights not in ("auto", "packed", "dequantized"):
            raise ValueError(
                f"quantized_weights must be auto, packed or dequantized: {self.quantized_weights!r}"
            )

    @property
    def names_pool_size(self) -> bool:
        """Whether the pool has the size that somebody chose, not what is left for it."""
        return self.num_blocks is not None or self.kv_memory is not None

    def scheduler_config(
        self, num_blocks: int, num_host_blocks: int, max_context: int
    ) -> SchedulerConfig:
        """The scheduler's settings, once the model runner knows the sizes of its pools."""
        return SchedulerConfig(
            num_blocks=num_blocks,
            block_size=self.block_size,
            num_host_blocks=num_host_blocks,
            max_num_sequences=self.max_num_sequences,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefill_chunk=self.prefill_chunk,
            max_context=max_context,
            enable_prefix_caching=self.enable_prefix_caching,
            preemption_mode=self.preemption_mode,
            admission_rule=self.admission_rule,
            watermark=self.watermark,
            max_num_waiting=self.max_num_waiting,
            num_speculative_tokens=0 if self.speculative == "off" else self.num_speculative_tokens,
            prompt_lookup_min=self.prompt_lookup_min,
            prompt_lookup_max=self.prompt_lookup_max,
            preempt_every=self.faults.preempt_every,
            hash_bits=self.faults.hash_bits,
        )
