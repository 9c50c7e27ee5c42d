"""The requests that wait in the controller, and whose turn it is.

Keeps what a choice needs as arrays by row, so that every waiting request can be weighed against
every replica at once. Fair between tenants by block-seconds: deficit counters say which tenants
are in turn; who goes within a turn, and where, is the policy's choice. Grants nothing itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ..protos.messages import ReserveRequest
from .admission import Need
from .prefix_transfer import NO_SOURCE, Source
from .replica_view import BoolArray, FloatArray, IntArray
from .wait_forecast import Work

_COLUMNS = (
    "tokens",
    "needs",
    "since",
    "durations",
    "tenant_ids",
    "waiting",
    "source_slots",
    "source_tokens",
)


@dataclass(slots=True)
class WaitingRequest:
    """A request with a ticket.

    since: when it first asked (a kept appointment counts from the refusal). bonus_s: head start
    in seconds of waiting, by priority and class. duration_s: how long it is expected to hold its
    blocks. excluded: bit set of slots it must not go to.
    """

    request: ReserveRequest
    need: Need
    since: float
    arrived_at: float
    deadline_at: float | None
    bonus_s: float
    duration_s: float
    excluded: int = 0
    row: int = field(default=-1, init=False)

    @property
    def tenant(self) -> str:
        """Who pays."""
        return self.request.tenant

    @property
    def work(self) -> Work:
        """What it is expected to ask of the cluster."""
        request = self.request
        num_blocks = self.need.num_blocks
        return Work.of(request.num_tokens, num_blocks, request.num_samples, self.duration_s)


@dataclass(slots=True)
class _Tenant:
    """One tenant's part of the queue."""

    num_waiting: int = 0
    work: Work = field(default_factory=Work)


class FairQueue:
    """Waiting requests of one model."""

    def __init__(self) -> None:
        self._by_key: dict[str, WaitingRequest] = {}
        self._rows: list[WaitingRequest | None] = [None] * 16
        self._free_rows = list(range(15, -1, -1))
        self._tenants: dict[str, _Tenant] = {}  # those who wait
        self._deficits: dict[str, float] = {}
        self._mean_cost = 1.0
        self.mean_wait_s = 0.0
        self.work = Work()
        self.tokens: FloatArray = np.zeros(16)
        self.needs: IntArray = np.zeros(16, dtype=np.int64)
        self.since: FloatArray = np.zeros(16)
        self.durations: FloatArray = np.zeros(16)
        self.tenant_ids: IntArray = np.zeros(16, dtype=np.int64)
        self.waiting: BoolArray = np.zeros(16, dtype=np.bool_)
        self.barred: BoolArray = np.zeros((16, 0), dtype=np.bool_)
        self.hits: FloatArray = np.zeros((16, 0))
        self.host_hits: FloatArray = np.zeros((16, 0))
        self.shared: IntArray = np.zeros((16, 0), dtype=np.int64)
        self._tenant_numbers: dict[str, int] = {}
        self.has_host_hits = False
        self.source_slots: IntArray = np.full(16, NO_SOURCE, dtype=np.int64)
        self.source_tokens: FloatArray = np.zeros(16)

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[WaitingRequest]:
        return iter(self._by_key.values())

    def get(self, request_key: str) -> WaitingRequest | None:
        """The waiting request of that key."""
        return self._by_key.get(request_key)

    def at(self, row: int) -> WaitingRequest:
        """The request in a row that is in use."""
        waiting = self._rows[row]
        assert waiting is not None, f"row {row} is free"
        return waiting

    def longest_waiting(self) -> WaitingRequest | None:
        """Who came first of those who wait."""
        return next(iter(self._by_key.values()), None)

    def oldest_wait_s(self, now: float) -> float:
        """How long that one has waited; 0 where nobody waits."""
        oldest = self.longest_waiting()
        return 0.0 if oldest is None else now - oldest.arrived_at

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that wait."""
        return self.work.num_tokens

    @property
    def tenants(self) -> set[str]:
        """Who waits."""
        return set(self._tenants)

    def num_waiting(self, tenant: str) -> int:
        """How many requests of the tenant wait."""
        return self._tenants[tenant].num_waiting if tenant in self._tenants else 0

    def work_of(self, tenant: str) -> Work:
        """What the tenant's waiting requests ask for."""
        return self._tenants[tenant].work if tenant in self._tenants else Work()

    @property
    def num_rows(self) -> int:
        """Rows of the arrays, free ones included."""
        return len(self._rows)

    def widen(self, num_slots: int) -> None:
        """Make room for so many replicas."""
        more = num_slots - self.hits.shape[1]
        if more > 0:
            self.hits = np.pad(self.hits, ((0, 0), (0, more)))
            self.host_hits = np.pad(self.host_hits, ((0, 0), (0, more)))
            self.shared = np.pad(self.shared, ((0, 0), (0, more)))
            self.barred = np.pad(self.barred, ((0, 0), (0, more)))

    def add(self, waiting: WaitingRequest, num_slots: int) -> int:
        """Put it in; its hits are to be set by the caller."""
        key = waiting.request.request_key
        assert key not in self._by_key, f"{key} waits already"
        self.widen(num_slots)
        if not self._free_rows:
            self._double()
        row = self._free_rows.pop()
        waiting.row = row
        self._rows[row] = waiting
        self._by_key[key] = waiting
        self.tokens[row] = waiting.request.num_tokens
        self.needs[row] = waiting.need.num_blocks
        self.since[row] = waiting.since - waiting.bonus_s
        self.durations[row] = waiting.duration_s
        self.tenant_ids[row] = self._enter(waiting)
        self.waiting[row] = True
        self.barred[row] = False
        for slot in range(num_slots) if waiting.excluded else ():
            self.barred[row, slot] = bool(waiting.excluded >> slot & 1)
        return row

    def set_source(self, row: int, source: Source) -> None:
        """Who could send most of its prompt to another replica."""
        self.source_slots[row], self.source_tokens[row] = source.slot, source.num_tokens

    def remove(self, waiting: WaitingRequest) -> None:
        """Take it out: granted, given back, expired or refused."""
        del self._by_key[waiting.request.request_key]
        self._rows[waiting.row] = None
        self._free_rows.append(waiting.row)
        self.waiting[waiting.row] = False
        self._leave(waiting)

    def admit_to(self, slot: int) -> None:
        """The slot has another replica now: nobody is barred from it."""
        if slot < self.barred.shape[1]:
            self.barred[:, slot] = False

    def fitting(
        self, rows: slice | IntArray, slots: slice | IntArray, available: IntArray
    ) -> BoolArray:
        """Which of `rows` could go to which of `slots`; available: blocks, by slot."""
        wanted = self.needs[rows, None] - self.shared[rows][:, slots]
        return (wanted <= available[slots]) & ~self.barred[rows][:, slots]

    def in_turn(self) -> BoolArray | None:
        """Which rows belong to tenants whose turn it is; None when all do."""
        if len(self._tenants) < 2:
            return None
        owed = {tenant: self._deficits.get(tenant, 0.0) for tenant in self._tenants}
        best = max(owed.values())
        if best <= 0.0:
            # Everybody who waits gets the same, so much that somebody is in turn.
            for tenant in owed:
                owed[tenant] += self._mean_cost - best
                self._deficits[tenant] = owed[tenant]
        numbers = [self._tenant_numbers[tenant] for tenant, due in owed.items() if due > 0.0]
        return np.isin(self.tenant_ids, numbers) & self.waiting

    def charge(self, tenant: str, block_seconds: float) -> None:
        """A grant, or the difference to its estimate once it has ended."""
        if tenant in self._tenants or block_seconds > 0.0:
            self._deficits[tenant] = self._deficits.get(tenant, 0.0) - block_seconds
        if tenant not in self._tenants:
            self._settle(tenant)

    def learn_cost(self, block_seconds: float) -> None:
        """The size of a turn follows the mean cost of a request."""
        self._mean_cost += 0.05 * (block_seconds - self._mean_cost)

    def learn_wait(self, waited_s: float) -> None:
        """A request was granted after so long."""
        self.mean_wait_s += 0.02 * (waited_s - self.mean_wait_s)

    def check_integrity(self) -> None:
        """Assert that the maps, the rows and the sums agree."""
        used = [waiting for waiting in self._rows if waiting is not None]
        assert len(used) == len(self._by_key) == int(self.waiting.sum())
        assert len(used) + len(self._free_rows) == len(self._rows)
        assert self.num_tokens == sum(waiting.request.num_tokens for waiting in used)
        assert self.num_tokens >= 0 and self.work.block_seconds > -1e-6 * len(self._rows)
        counts: dict[str, int] = {}
        for waiting in used:
            counts[waiting.tenant] = counts.get(waiting.tenant, 0) + 1
            assert self._rows[waiting.row] is waiting
        counted = {name: tenant.num_waiting for name, tenant in self._tenants.items()}
        assert counts == counted, f"{counts} wait, {counted} counted"

    def _enter(self, waiting: WaitingRequest) -> int:
        name, work = waiting.tenant, waiting.work
        tenant = self._tenants.setdefault(name, _Tenant())
        tenant.num_waiting += 1
        tenant.work += work
        self.work += work
        number = self._tenant_numbers.get(name)
        if number is None:
            number = self._tenant_numbers[name] = len(self._tenant_numbers)
        return number

    def _leave(self, waiting: WaitingRequest) -> None:
        name, work = waiting.tenant, waiting.work
        tenant = self._tenants[name]
        tenant.num_waiting -= 1
        if tenant.num_waiting:
            tenant.work -= work
            self.work -= work
            return
        # What the last one leaves is rounding.
        self.work -= tenant.work
        del self._tenants[name]
        self._settle(name)
        if not self._tenants:
            self._tenant_numbers.clear()
            self.work = Work()

    def _settle(self, tenant: str) -> None:
        # Nobody saves up turns while not waiting, and a debt is at most one turn: a share is
        # owed only while others wait.
        debt = max(min(self._deficits.pop(tenant, 0.0), 0.0), -self._mean_cost)
        if debt and len(self._deficits) < 100_000:
            self._deficits[tenant] = debt

    def _double(self) -> None:
        size = len(self._rows)
        self._rows += [None] * size
        self._free_rows = list(range(2 * size - 1, size - 1, -1))
        for name in _COLUMNS:
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        for name in ("barred", "hits", "host_hits", "shared"):
            matrix = getattr(self, name)
            setattr(self, name, np.concatenate([matrix, np.zeros_like(matrix)]))
