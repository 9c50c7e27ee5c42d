"""How many blocks a request needs, whether the queue may take it, and when to come back.

Pure arithmetic on the request, the learnt output lengths and the state of the queue. Does not
choose a replica and does not order the queue.
"""

import random
from collections import OrderedDict
from dataclasses import dataclass

from ..protos.messages import AdmissionClass, ReserveRequest
from .forecast import OutputLengths


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Bounds and promises.

    standard_quantile: share of standard requests whose output shall fit in their lease.
    max_queue_s: refuse what the forecast says would wait longer; None = no such bound.
    appointment_grace_s: how late a client may come and still be let in first.
    appointment_early_s: how early it may come.
    outage_s: what waits is refused once no replica has served the model for so long.
    hold_s: where replicas come on demand, a request waits so long for the first one; 0 = they do
        not, and a newcomer is refused while there is none.
    """

    max_queued_requests: int = 4096
    max_queued_tokens: int = 64_000_000
    max_queue_s: float | None = None
    standard_quantile: float = 0.9
    min_retry_after_s: float = 0.1
    max_retry_after_s: float = 60.0
    appointment_grace_s: float = 5.0
    appointment_early_s: float = 0.05
    max_appointments: int = 100_000
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


@dataclass(slots=True)
class Appointment:
    """A refused client's place: it goes first if it comes back at its time."""

    due: float
    refused_at: float
    service_s: float


class AppointmentBook:
    """Appointments given and not yet kept, laid end to end so that each finds room.

    `service_s` of a request is the time that the whole cluster needs for it; the next appointment
    begins where the last one's service ends.
    """

    def __init__(self, config: AdmissionConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng
        self._by_token: OrderedDict[str, Appointment] = OrderedDict()
        self._booked_until = 0.0
        self.num_made = 0
        self.num_kept = 0

    def __len__(self) -> int:
        return len(self._by_token)

    def make(self, now: float, room_in_s: float, service_s: float) -> tuple[str, float]:
        """A token and the seconds after which to come back."""
        self._forget_lapsed(now)
        config = self._config
        earliest = now + max(room_in_s, config.min_retry_after_s)
        due = min(max(earliest, self._booked_until), now + config.max_retry_after_s)
        self._booked_until = max(self._booked_until, due) + service_s
        token = f"{self._rng.getrandbits(128):032x}"
        self._by_token[token] = Appointment(due, now, service_s)
        if len(self._by_token) > config.max_appointments:
            self._by_token.popitem(last=False)
        self.num_made += 1
        return token, due - now

    def find(self, token: str, now: float) -> Appointment | None:
        """The appointment if it has not lapsed; it may still be too early for it."""
        appointment = self._by_token.get(token) if token else None
        if appointment is None or now > appointment.due + self._config.appointment_grace_s:
            return None
        return appointment

    def is_early(self, appointment: Appointment, now: float) -> bool:
        """The client came before its time: it is told to wait for the rest."""
        return now < appointment.due - self._config.appointment_early_s

    def keep(self, token: str) -> None:
        """The client came back in time and was let in."""
        del self._by_token[token]
        self.num_kept += 1

    def _forget_lapsed(self, now: float) -> None:
        # Insertion order is order of due time but for the cap on retry-after: good enough to
        # stop at the first that has not lapsed.
        while self._by_token:
            token, appointment = next(iter(self._by_token.items()))
            if now <= appointment.due + self._config.appointment_grace_s:
                break
            del self._by_token[token]
        if not self._by_token:
            self._booked_until = 0.0
