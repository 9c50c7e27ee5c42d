"""What it costs to bring KV back, in milliseconds, from what was measured. Knows no block."""

from .config import SchedulerConfig

# A new measurement's weight in the running mean.
_WEIGHT = 0.1
# Steps smaller than this say more about overheads than about the prefill rate.
_MIN_PREFILL_TOKENS = 32


class CostModel:
    """Running means of the prefill rate and the copy bandwidth, begun from the settings."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._block_size = config.block_size
        self._block_bytes = config.block_bytes
        self.prefill_tokens_per_s = config.prefill_tokens_per_s
        self.copy_bytes_per_s = config.copy_bytes_per_s
        self.decode_step_s = 0.0  # of steps that compute one token a row; 0 = none was yet

    def recompute_ms(self, num_tokens: int) -> float:
        """To compute so many positions again."""
        return 1000.0 * num_tokens / self.prefill_tokens_per_s

    def copy_ms(self, num_blocks: int) -> float:
        """To copy so many blocks from one tier to the other."""
        return 1000.0 * num_blocks * self._block_bytes / self.copy_bytes_per_s

    @property
    def loads_pay(self) -> bool:
        """Whether loading a block from the host is cheaper than computing it."""
        return self.copy_ms(1) <= self.recompute_ms(self._block_size)

    def waiting_pays(self, num_tokens: int) -> bool:
        """Whether a step more costs less than to compute so many positions."""
        return self.recompute_ms(num_tokens) > 1000.0 * self.decode_step_s

    def observe_step(self, num_tokens: int, num_rows: int, elapsed_s: float) -> None:
        """A step took so long. Only steps that mostly prefill say how fast prefill is."""
        if elapsed_s <= 0.0:
            return
        if num_tokens == num_rows:
            weight = _WEIGHT if self.decode_step_s else 1.0
            self.decode_step_s += weight * (elapsed_s - self.decode_step_s)
        elif num_tokens >= max(_MIN_PREFILL_TOKENS, 4 * num_rows):
            rate = num_tokens / elapsed_s
            self.prefill_tokens_per_s += _WEIGHT * (rate - self.prefill_tokens_per_s)

    def observe_copy(self, num_blocks: int, elapsed_s: float) -> None:
        """A copy of so many blocks took so long."""
        if elapsed_s > 0.0 and self._block_bytes:
            rate = num_blocks * self._block_bytes / elapsed_s
            self.copy_bytes_per_s += _WEIGHT * (rate - self.copy_bytes_per_s)
