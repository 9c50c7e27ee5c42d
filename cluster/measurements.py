"""What a simulation leaves behind."""

from dataclasses import dataclass, field

from .replay_replica import SimulatedRequest


@dataclass(slots=True)
class Measurements:
    """What clients saw, and what the controller took for it."""

    ttft_s: list[float] = field(default_factory=list[float])
    tpot_s: list[float] = field(default_factory=list[float])
    decision_us: list[float] = field(default_factory=list[float])
    report_us: list[float] = field(default_factory=list[float])
    hit_tokens: int = 0
    prompt_tokens: int = 0
    refused: int = 0
    expired: int = 0
    refusals: int = 0
    first_retries: int = 0
    first_retries_served: int = 0
    restarts: int = 0
    transfers: int = 0
    transfers_failed: int = 0
    transferred_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    duration_s: float = 0.0
    computed_tokens: dict[str, int] = field(default_factory=dict[str, int])
    tenant_block_s: dict[str, float] = field(default_factory=dict[str, float])

    def note_finished(self, request: SimulatedRequest, block_size: int) -> None:
        """A request has ended; one that was never served counts in no mean."""
        if request.num_refusals and request.first_retry_served is not None:
            self.first_retries += 1
            self.first_retries_served += request.first_retry_served
        if request.first_token_s is None or request.finished_s is None:
            return
        trace = request.trace
        output_s = request.finished_s - request.first_token_s
        self.finished += 1
        self.ttft_s.append(request.first_token_s - trace.arrival_s)
        self.tpot_s.append(output_s / max(1, trace.num_output_tokens))
        self.hit_tokens += request.hit_tokens
        self.prompt_tokens += request.num_prompt_tokens
        num_blocks = -(-(request.num_prompt_tokens + trace.num_output_tokens) // block_size)
        held_s = self.tenant_block_s.get(trace.tenant, 0.0) + num_blocks * output_s
        self.tenant_block_s[trace.tenant] = held_s

    def note_ended(self, replica_id: str, computed_tokens: int, preemptions: int) -> None:
        """An incarnation is over."""
        self.computed_tokens[replica_id] = self.computed_tokens.get(replica_id, 0) + computed_tokens
        self.preemptions += preemptions
