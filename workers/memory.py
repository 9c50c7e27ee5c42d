"""How one rank's memory is divided: weights, workspace, reserve, and what is left for KV blocks.

Knows sizes and the machine's limits, no tensor of the model. What a GPU really takes is measured
by `device_profile` and comes in as a value.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .config import WorkerConfig
from .models.config import DecoderConfig, ModelError

_CPU_FRACTION = 0.25
_CUDA_FRACTION = 0.9
_RESERVE_FRACTION = 0.02
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_CGROUP_USED = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")

# Logits of prompt positions are computed in chunks of at most this many bytes.
PROMPT_LOGITS_BYTES = 64 * 2**20


class NotEnoughMemory(ModelError):
    """What is left cannot hold a KV pool of any use."""


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """What the driver and torch say of a GPU at one moment, in bytes.

    free, total: of the device, whoever uses it. allocated, reserved: of this process, by torch's
    allocator; peak: the most that was allocated since it was last asked to forget.
    """

    free: int
    total: int
    allocated: int
    reserved: int
    peak: int


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """What a rank takes of its GPU beside KV blocks, measured.

    start: before it took anything; loaded: with its weights; stepped: after a step of the greatest
    size. graphs: bytes that recorded steps will take.
    """

    start: DeviceReading
    loaded: DeviceReading
    stepped: DeviceReading
    graphs: int = 0

    @property
    def activations(self) -> int:
        """Of the step, at its peak."""
        return max(0, self.stepped.peak - self.loaded.allocated)

    @property
    def untracked(self) -> int:
        """Taken since the start outside of torch's allocator: by NCCL, cuBLAS, loaded kernels. What
        another process took meanwhile cannot be told from it, and is as little ours to give."""
        taken = self.start.free - self.stepped.free
        return max(0, taken - (self.stepped.reserved - self.start.reserved))

    def budget(self, fraction: float) -> int:
        """Bytes for workspace, reserve and KV pool. What other processes hold is not ours, and
        `fraction` of the whole device is the most that all of ours may take."""
        most = min(self.start.free, int(self.start.total * fraction))
        return most - self.loaded.allocated - self.untracked - self.graphs

    @property
    def text(self) -> str:
        """One line."""
        parts = {
            "weights": self.loaded.allocated,
            "activations": self.activations,
            "outside torch": self.untracked,
            "graphs": self.graphs,
            "others": self.start.total - self.start.free,
        }
        return ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in parts.items())


@dataclass(frozen=True, slots=True)
class MemoryPartition:
    """Bytes of each part, on the device and on the host tier. `text` is for the start-up log."""

    weights: int
    workspace: int
    reserve: int
    kv_pool: int
    host_pool: int
    num_blocks: int
    num_host_blocks: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Blocks of the two pools."""
        return self.num_blocks, self.num_host_blocks

    def limited(self, num_blocks: int, num_host_blocks: int) -> "MemoryPartition":
        """The same with smaller pools: those of the rank that has room for the fewest blocks."""
        return replace(
            self,
            kv_pool=self.kv_pool // self.num_blocks * num_blocks,
            host_pool=self.host_pool // max(1, self.num_host_blocks) * num_host_blocks,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
        )

    @property
    def text(self) -> str:
        """One line."""
        parts = {
            "weights": self.weights,
            "workspace": self.workspace,
            "reserve": self.reserve,
            f"KV pool ({self.num_blocks} blocks)": self.kv_pool,
            f"host pool ({self.num_host_blocks} blocks)": self.host_pool,
        }
        return ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in parts.items())


def plan_memory(
    config: WorkerConfig,
    model: DecoderConfig,
    max_context: int,
    device: torch.device,
    weights: int,
    element_size: int,
    num_sharers: int = 1,
    kv_element_size: int | None = None,
    profile: DeviceProfile | None = None,
) -> MemoryPartition:
    """Sizes of all parts; call it once the weights are loaded.

    num_sharers: ranks that take from the same memory: a GPU has one, a host may have several.
    kv_element_size: None = element_size, the activations'. profile: what was measured; None =
    estimated.

    The pool never exceeds what all rows at the longest context could fill.
    """
    block_bytes = model.block_bytes(config.block_size, kv_element_size or element_size)
    workspace = workspace_bytes(config, model, element_size)
    if profile is not None:
        workspace = profile.activations
    reserve = 0
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    elif config.kv_memory is not None:
        num_blocks = config.kv_memory // block_bytes
    else:
        budget, reserve = _budget(config, device, weights, num_sharers, profile)
        most = config.max_num_sequences * -(-max_context // config.block_size)
        num_blocks = min((budget - workspace - reserve) // block_bytes, most)
    if num_blocks < 1:
        raise NotEnoughMemory(
            f"no room for one KV block of {block_bytes} bytes beside weights of"
            f" {weights / 2**20:.0f} MiB and workspace of {workspace / 2**20:.0f} MiB"
        )
    num_host_blocks = config.host_memory // block_bytes
    return MemoryPartition(
        weights=weights,
        workspace=workspace,
        reserve=reserve,
        kv_pool=num_blocks * block_bytes,
        host_pool=num_host_blocks * block_bytes,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
    )


def workspace_bytes(config: WorkerConfig, model: DecoderConfig, element_size: int) -> int:
    """The most that one step's activations take, logits and log-probabilities included."""
    ffn = model.intermediate_size
    if model.experts is not None:
        # Experts run one after the other.
        ffn = max(ffn, model.experts.intermediate_size)
    widest_layer = 3 * model.hidden_size + 2 * model.q_size + 2 * model.kv_size + 3 * ffn
    activations = config.max_num_batched_tokens * widest_layer * element_size
    # Logits, the weights drawn from, and one temporary of the same size.
    logits = 3 * config.max_num_sequences * model.vocab_size * 4
    return activations + max(logits, 3 * PROMPT_LOGITS_BYTES)


def _budget(
    config: WorkerConfig,
    device: torch.device,
    weights: int,
    num_sharers: int,
    profile: DeviceProfile | None,
) -> tuple[int, int]:
    """Bytes for workspace, reserve and pool, and how much of them the reserve is."""
    if profile is not None:
        fraction = config.memory_fraction or _CUDA_FRACTION
        return profile.budget(fraction), int(profile.start.total * _RESERVE_FRACTION)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        fraction = config.memory_fraction or _CUDA_FRACTION
        # What other processes hold is not ours to divide.
        return min(free, int(total * fraction) - weights), int(total * _RESERVE_FRACTION)
    available = available_memory()
    fraction = (config.memory_fraction or _CPU_FRACTION) / num_sharers
    return int(available * fraction), int(available * fraction * _RESERVE_FRACTION)


def check_free(kv_pool: int) -> None:
    """Raises NotEnoughMemory where a pool of as many bytes would be the end of this process."""
    available = available_memory()
    if kv_pool > available:
        raise NotEnoughMemory(
            f"the KV pool (--num-blocks, --kv-memory) takes {kv_pool / 2**20:.0f} MiB and"
            f" {available / 2**20:.0f} MiB are free: ask for fewer blocks"
        )


def available_memory() -> int:
    """Bytes this process could still take: the system's, within its control group's limit."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit_path, used_path in zip(_CGROUP_LIMITS, _CGROUP_USED, strict=True):
        limit, used = _read_bytes(limit_path), _read_bytes(used_path)
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used))
    return available


def _read_bytes(path: str) -> int | None:
    file = Path(path)
    text = file.read_text().strip() if file.exists() else "max"
    return int(text) if text.isdigit() else None
