"""How many blocks a request needs, and the bounds of what the queue may take.

Pure arithmetic on the request and the learnt output lengths. Does not
choose a replica and does not order the queue.
"""

from dataclasses import dataclass, field

from ..protos.messages import AdmissionClass, ReserveRequest
from .appointments import AppointmentConfig
from .forecast import OutputLengths


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Bounds and promises.

    standard_quantile: share of standard requests whose output shall fit in their lease.
    max_queue_s: refuse what the forecast says would wait longer; None = no such bound.
    outage_s: what waits is refused once no replica has served the model for so long.
    hold_s: where replicas come on demand, a request waits so long for the first one; 0 = they do
        not, and a newcomer is refused while there is none.
    """

    max_queued_requests: int = 4096
    max_queued_tokens: int = 64_000_000
    max_queue_s: float | None = None
    standard_quantile: float = 0.9
    appointments: AppointmentConfig = field(default_factory=AppointmentConfig)
    outage_s: float = 10.0
    hold_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Need:
    """What a request takes: blocks of its lease, growth per sample, and the expected output."""

    num_blocks: int
    growth_tokens: int
    expected_output_tokens: float

    def without(self, num_shared: int) -> "Need":
        """The same where so many blocks are held by others already."""
        if not num_shared:
            return self
        blocks = self.num_blocks - num_shared
        return Need(blocks, self.growth_tokens, self.expected_output_tokens)


def blocks_for(num_tokens: int, growth: int, num_samples: int, block_size: int) -> int:
    """The prompt once, and the growth of every sample: samples share the prompt's full blocks."""
    shared = num_tokens // block_size
    per_sample = -(-(num_tokens + growth) // block_size) - shared
    return shared + num_samples * per_sample


def least_blocks(request: ReserveRequest, block_size: int) -> int:
    """The fewest blocks that could hold the request at all; more than a pool has = never fits.

    The last token generated is never written, and only a guaranteed lease covers all growth.
    """
    growth = 0
    if request.admission_class is AdmissionClass.GUARANTEED and request.max_tokens:
        growth = request.max_tokens - 1
    return blocks_for(request.num_tokens, growth, request.num_samples, block_size)


def compute_need(
    request: ReserveRequest,
    lengths: OutputLengths,
    *,
    block_size: int,
    max_context: int,
    standard_quantile: float,
) -> Need:
    """The size of the lease by class: worst case, a likely size, or the prompt alone."""
    room = max(0, max_context - request.num_tokens)
    limit = room if request.max_tokens is None else min(room, request.max_tokens)
    if request.admission_class is AdmissionClass.GUARANTEED:
        growth = limit
    elif request.admission_class is AdmissionClass.STANDARD:
        growth = min(limit, lengths.quantile(standard_quantile))
    else:
        growth = min(limit, 1)
    return Need(
        blocks_for(request.num_tokens, growth, request.num_samples, block_size),
        growth,
        lengths.expected(limit),
    )
