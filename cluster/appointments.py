"""Refused clients' places: when each shall come back, so that it is let in at its time.

Every tenant has a line of its own, laid end to end, at its share of the cluster: who sends ten
times as much waits ten times as long, and nobody else does. Knows no queue and no replica.
"""

import random
from collections import OrderedDict
from dataclasses import dataclass

# How fast the share of kept appointments follows what clients do.
_WEIGHT = 0.05


@dataclass(frozen=True, slots=True)
class AppointmentConfig:
    """grace_s: how late a client may come and still be let in; early_s: how early it may come."""

    min_retry_after_s: float = 0.1
    max_retry_after_s: float = 60.0
    grace_s: float = 5.0
    early_s: float = 0.05
    max_appointments: int = 100_000


@dataclass(slots=True)
class Appointment:
    """A refused client's place: it goes first if it comes back at its time."""

    tenant: str
    due: float
    refused_at: float


@dataclass(slots=True)
class _Line:
    """One tenant's appointments: how many are open, and when the last one's service ends."""

    booked_until: float
    num_open: int = 0


class AppointmentBook:
    """Appointments given and not yet kept."""

    def __init__(self, config: AppointmentConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng
        self._by_token: OrderedDict[str, Appointment] = OrderedDict()
        self._lines: dict[str, _Line] = {}
        self.kept_share = 1.0
        self.num_made = 0
        self.num_kept = 0

    def __len__(self) -> int:
        return len(self._by_token)

    @property
    def tenants(self) -> set[str]:
        """Who has open appointments."""
        return set(self._lines)

    def booked_s(self, tenant: str, now: float) -> float:
        """Seconds from now that the tenant's line is taken for, were all of it kept."""
        line = self._lines.get(tenant)
        return 0.0 if line is None else max(0.0, line.booked_until - now)

    def make(
        self, tenant: str, now: float, *, room_in_s: float, service_s: float
    ) -> tuple[str, float]:
        """A token and the seconds after which to come back.

        service_s: how long the tenant's share of the cluster needs for the request; its next
        appointment begins where this one's service ends. Beyond `max_retry_after_s` no time can
        be promised: the token is empty then, and the client comes as a newcomer.
        """
        self._forget_lapsed(now)
        config = self._config
        line = self._lines.get(tenant)
        due = now + max(room_in_s, config.min_retry_after_s)
        if line is not None:
            due = max(due, line.booked_until)
        if due > now + config.max_retry_after_s or len(self) >= config.max_appointments:
            return "", config.max_retry_after_s
        if line is None:
            line = self._lines[tenant] = _Line(due)
        line.booked_until = due + service_s
        line.num_open += 1
        token = f"{self._rng.getrandbits(128):032x}"
        self._by_token[token] = Appointment(tenant, due, now)
        self.num_made += 1
        return token, due - now

    def find(self, token: str, now: float) -> Appointment | None:
        """The appointment if it has not lapsed; it may still be too early for it."""
        appointment = self._by_token.get(token) if token else None
        if appointment is None or self._has_lapsed(appointment, now):
            return None
        return appointment

    def is_early(self, appointment: Appointment, now: float) -> bool:
        """The client came before its time: it is told to wait for the rest."""
        return now < appointment.due - self._config.early_s

    def keep(self, token: str) -> None:
        """The client came back in time and was let in."""
        self._close(token)
        self.num_kept += 1
        self.kept_share += _WEIGHT * (1.0 - self.kept_share)

    def check_integrity(self) -> None:
        """Assert that the lines count what is open."""
        counts: dict[str, int] = {}
        for appointment in self._by_token.values():
            counts[appointment.tenant] = counts.get(appointment.tenant, 0) + 1
        lines = {tenant: line.num_open for tenant, line in self._lines.items()}
        assert counts == lines, f"{counts} open, {lines} counted"

    def _has_lapsed(self, appointment: Appointment, now: float) -> bool:
        return now > appointment.due + self._config.grace_s

    def _forget_lapsed(self, now: float) -> None:
        # In order of making, which within a tenant is the order of due times; another's that is
        # due earlier may lie behind for a while.
        while self._by_token:
            token, appointment = next(iter(self._by_token.items()))
            if not self._has_lapsed(appointment, now):
                break
            self._close(token)
            self.kept_share -= _WEIGHT * self.kept_share

    def _close(self, token: str) -> None:
        tenant = self._by_token.pop(token).tenant
        line = self._lines[tenant]
        line.num_open -= 1
        if not line.num_open:
            del self._lines[tenant]
