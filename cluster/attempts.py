"""The newest attempt of every request that waits or is under a lease, by request and by lease.

Gateways name requests; leaders name leases. Keeps both names together, decides nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from .fair_queue import WaitingRequest
from .grants import Grant
from .lease_table import LeaseRecord
from .model_pool import ModelPool


@dataclass(slots=True)
class Attempt:
    """One attempt in its pool: either it waits, or it has a lease."""

    number: int
    pool: ModelPool
    waiting: WaitingRequest | None = None
    record: LeaseRecord | None = None


class Attempts:
    """At most one of each request."""

    def __init__(self) -> None:
        self._by_key: dict[str, Attempt] = {}
        self._by_lease: dict[int, str] = {}

    def get(self, request_key: str) -> Attempt | None:
        """The request's newest; None where it neither waits nor has a lease."""
        return self._by_key.get(request_key)

    def waits(self, waiting: WaitingRequest, pool: ModelPool) -> None:
        """It has been queued, for the first time or in another pool."""
        request = waiting.request
        self._by_key[request.request_key] = Attempt(request.attempt, pool, waiting=waiting)

    def granted(self, grant: Grant, pool: ModelPool) -> None:
        """It has a lease now."""
        request, record = grant.request, grant.record
        self._by_key[request.request_key] = Attempt(request.attempt, pool, record=record)
        self._by_lease[record.lease_id] = request.request_key

    def forget(self, request_key: str) -> None:
        """It has ended, or a later one takes its place."""
        attempt = self._by_key.pop(request_key)
        if attempt.record is not None:
            del self._by_lease[attempt.record.lease_id]

    def forget_lease(self, record: LeaseRecord) -> None:
        """The lease has ended, and the attempt with it if it has not been superseded."""
        key = self._by_lease.pop(record.lease_id, None)
        if key is not None:
            del self._by_key[key]

    def waiting_for(self, gateway_id: str) -> Iterator[tuple[str, Attempt]]:
        """The gateway's requests that wait; a copy, so that they may end meanwhile."""
        for key, attempt in list(self._by_key.items()):
            if attempt.waiting is not None and attempt.waiting.request.gateway_id == gateway_id:
                yield key, attempt

    def check_integrity(self, num_waiting: int) -> None:
        """Assert that each is in one state and both names agree. num_waiting: in all queues."""
        attempts = self._by_key.values()
        assert num_waiting == sum(attempt.waiting is not None for attempt in attempts)
        for key, attempt in self._by_key.items():
            assert (attempt.waiting is None) != (attempt.record is None), f"{key} is in two states"
            if attempt.record is not None:
                assert self._by_lease[attempt.record.lease_id] == key
        for lease_id, key in self._by_lease.items():
            record = self._by_key[key].record
            assert record is not None and record.lease_id == lease_id
