"""What a cluster was told to be: checked values, no behaviour.

Knows the limits of each setting and how sizes are written. Knows nothing of Ray, models or
devices; what depends on them is found out by the workers.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..scheduler.config import AdmissionRule, PreemptionMode
from ..workers.config import SPECULATIVE_METHODS
from ..workers.faults import Faults

if TYPE_CHECKING:  # needs pydantic: too slow for every command
    from .security import GatewaySecurity

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]?i?)b?", re.IGNORECASE)

DTYPES = ("auto", "float32", "bfloat16")
WEIGHT_DTYPES = ("auto", "bfloat16", "int8")
KV_DTYPES = ("auto", "fp8")
QUANTIZED_WEIGHTS = ("auto", "packed", "dequantized")
DEVICES = ("auto", "cpu", "cuda")
PREEMPTION_MODES = tuple(PreemptionMode)
ADMISSION_RULES = tuple(AdmissionRule)


class CommandError(Exception):
    """A command cannot go on; the message says why and what the user can do."""


def parse_bytes(text: str) -> int:
    """'512MiB', '2G', '1.5 GiB' or a plain number of bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise CommandError(f"{text!r} is not a size; write it like 512MiB, 2GiB or 1073741824")
    number, unit = match.groups()
    return int(float(number) * (_UNITS | _BINARY_UNITS)[unit.lower()])


def format_bytes(num_bytes: int) -> str:
    """'512 MiB': the largest binary unit that leaves at least 1."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A checkpoint folder or a hub id, or empty for the default model; and what clients call it."""

    checkpoint: str
    name: str


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """A cluster that serves one model or several, as the flags of `pagefleet serve` describe it.

    replicas, tp and all that sizes a replica: of each model.
    num_blocks / kv_memory: size of each replica's KV pool, in blocks or bytes; both None = by
        `memory_fraction`. host_memory: bytes of each replica's second tier; 0 = none.
    prefix_transfer: copy cached prefixes from one replica to another where that is cheaper than
        to compute them; both need a second tier.
    max_model_len: the longest sequence; None = the model's own.
    preemption_mode, admission_rule, watermark, max_num_waiting: of each replica's scheduler, for
        when blocks run out; see `SchedulerConfig`.
    speculative, num_speculative_tokens, prompt_lookup_min, prompt_lookup_max, overlap_steps: of
        each replica's steps; see `WorkerConfig`.
    address: a running Ray cluster to join; None = start a private one here.
    grpc_port / http_port: 0 = any free one.
    max_queue_s: the cluster refuses, with an appointment, what it expects to wait longer; None = it
        queues up to its bounds in requests and tokens.
    security: API keys and TLS of the gateway; None = neither.
    faults: what goes wrong on purpose in every replica, in tests.
    """

    models: tuple[NamedModel, ...]
    replicas: int = 1
    tp: int = 1
    host: str = "127.0.0.1"
    grpc_port: int = 50051
    http_port: int = 8000
    num_blocks: int | None = None
    kv_memory: int | None = None
    memory_fraction: float | None = None
    block_size: int = 16
    host_memory: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    prefix_transfer: bool = True
    preemption_mode: str = "auto"
    admission_rule: str = "known-length"
    watermark: float = 0.01
    max_num_waiting: int | None = None
    max_queue_s: float | None = None
    speculative: str = "off"
    num_speculative_tokens: int = 5
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    overlap_steps: bool | None = None
    dtype: str = "auto"
    weight_dtype: str = "auto"
    quantized_weights: str = "auto"
    kv_dtype: str = "auto"
    enforce_eager: bool = False
    device: str = "auto"
    deterministic: bool = False
    address: str | None = None
    security: "GatewaySecurity | None" = None
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        self._check_names()
        self._check_counts()
        self._check_ports()
        self._check_memory()
        _check_choice("--dtype", self.dtype, DTYPES)
        _check_choice("--weight-dtype", self.weight_dtype, WEIGHT_DTYPES)
        _check_choice("--quantized-weights", self.quantized_weights, QUANTIZED_WEIGHTS)
        _check_choice("--kv-dtype", self.kv_dtype, KV_DTYPES)
        _check_choice("--device", self.device, DEVICES)
        _check_choice("--preemption-mode", self.preemption_mode, PREEMPTION_MODES)
        _check_choice("--admission-rule", self.admission_rule, ADMISSION_RULES)
        _check_choice("--speculative", self.speculative, SPECULATIVE_METHODS)
        if not 0.0 <= self.watermark < 1.0:
            raise CommandError(f"--watermark must be from 0 to below 1, is {self.watermark}")

    @property
    def num_replicas(self) -> int:
        """Of all models together."""
        return self.replicas * len(self.models)

    def _check_names(self) -> None:
        names = [model.name for model in self.models]
        if not names:
            raise CommandError("there is no model to serve")
        if "" in names:
            raise CommandError("--served-model-name must not be empty")
        if len(set(names)) < len(names):
            raise CommandError(
                f"two models would have one name ({', '.join(names)}): "
                "give --served-model-name for each --model"
            )

    def _check_counts(self) -> None:
        _check_at_least("--replicas", self.replicas, 1)
        _check_at_least("--tp", self.tp, 1)
        _check_at_least("--block-size", self.block_size, 1)
        _check_at_least("--max-num-seqs", self.max_num_seqs, 1)
        _check_at_least("--max-num-batched-tokens", self.max_num_batched_tokens, 1)
        _check_at_least("--max-model-len", self.max_model_len, 2)
        _check_at_least("--max-num-waiting", self.max_num_waiting, 1)
        if self.max_queue_s is not None and not 0 < self.max_queue_s < math.inf:
            raise CommandError(f"--max-queue-s must be above 0, not {self.max_queue_s:g}")
        _check_at_least("--num-speculative-tokens", self.num_speculative_tokens, 1)
        _check_at_least("--prompt-lookup-min", self.prompt_lookup_min, 1)
        _check_at_least("--prompt-lookup-max", self.prompt_lookup_max, self.prompt_lookup_min)

    def _check_ports(self) -> None:
        for flag, port in (("--grpc-port", self.grpc_port), ("--http-port", self.http_port)):
            if not 0 <= port <= 65535:
                raise CommandError(f"{flag} must be from 0 to 65535, is {port}")
        if self.grpc_port and self.grpc_port == self.http_port:
            raise CommandError(f"--grpc-port and --http-port are both {self.grpc_port}")

    def _check_memory(self) -> None:
        _check_at_least("--num-blocks", self.num_blocks, 1)
        _check_at_least("--kv-memory", self.kv_memory, 1)
        _check_at_least("--host-memory", self.host_memory, 0)
        sizes = (self.num_blocks, self.kv_memory, self.memory_fraction)
        if sum(size is not None for size in sizes) > 1:
            raise CommandError(
                "--num-blocks, --kv-memory and --gpu-memory-utilization each size the KV pool: "
                "give one"
            )
        if self.memory_fraction is not None and not 0.0 < self.memory_fraction <= 1.0:
            raise CommandError(
                f"--gpu-memory-utilization must be above 0 and at most 1, is {self.memory_fraction}"
            )


def parse_faults(texts: Sequence[str]) -> Faults:
    """'late-copies', 'hash-bits=8' and so on."""
    try:
        return Faults.parse(texts)
    except ValueError as error:
        raise CommandError(f"--fault: {error}") from error


def name_models(checkpoints: Sequence[str], names: Sequence[str]) -> tuple[NamedModel, ...]:
    """Each checkpoint with the name of the same place; without any names they name themselves."""
    if names and len(names) != len(checkpoints):
        raise CommandError(
            f"there are {len(checkpoints)} --model and {len(names)} --served-model-name: "
            "give one name for each, or none"
        )
    named = names or [default_served_name(checkpoint) for checkpoint in checkpoints]
    return tuple(NamedModel(*pair) for pair in zip(checkpoints, named, strict=True))


def default_served_name(model: str) -> str:
    """A hub id names itself; a folder is called by its last part."""
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model


def _check_at_least(flag: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise CommandError(f"{flag} must be at least {least}, is {value}")


def _check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise CommandError(f"{flag} must be one of {', '.join(choices)}, is {value!r}")
