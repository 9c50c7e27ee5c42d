"""What tenants may use of a gateway: rates of requests, tokens and block-seconds.

A rate is a bucket that holds one minute's worth. Prompts are paid at the door, output and blocks
while they come, so a bucket may go into debt, and then the tenant's next request waits for it.
Knows neither keys nor the cluster: with several gateways each has buckets of its own.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..protos.errors import Overloaded
from .api_keys import TenantQuota
from .generation import OutputDelta

_WINDOW_S = 60.0
_CONCURRENCY_RETRY_S = 1.0


class Bucket:
    """Fills by `per_minute` a minute, up to that; can be overdrawn."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._rate = per_minute / _WINDOW_S
        self._capacity = per_minute
        self._level = per_minute
        self._filled_at = now

    def wait_s(self, amount: float, now: float) -> float:
        """Until `amount` is there (or all that fits, if it is more); 0 = it is."""
        self._fill(now)
        missing = min(amount, self._capacity) - self._level
        return max(missing, 0.0) / self._rate

    def take(self, amount: float, now: float) -> None:
        """Pay, whatever there is."""
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        self._level = min(self._capacity, self._level + (now - self._filled_at) * self._rate)
        self._filled_at = now


@dataclass(slots=True)
class _Account:
    requests: Bucket | None
    tokens: Bucket | None
    block_seconds: Bucket | None
    num_running: int = 0


class Quotas:
    """The accounts of all tenants that have a quota."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[str, tuple[TenantQuota, _Account]] = {}

    def admit(
        self, tenant: str, quota: TenantQuota, num_prompt_tokens: int, block_size: int
    ) -> "QuotaUse":
        """Let a request in and pay for its prompt. Raises Overloaded, and nothing is paid."""
        account = self._account(tenant, quota)
        limit = quota.max_concurrent_requests
        if limit is not None and account.num_running >= limit:
            raise Overloaded(
                f"over quota: {limit} requests at a time", retry_after_s=_CONCURRENCY_RETRY_S
            )
        now = self._clock()
        for name, bucket, amount in (
            ("requests", account.requests, 1.0),
            ("tokens", account.tokens, float(num_prompt_tokens)),
            ("block-seconds", account.block_seconds, 1.0),
        ):
            wait_s = 0.0 if bucket is None else bucket.wait_s(amount, now)
            if wait_s > 0.0:
                raise Overloaded(f"over quota: {name} per minute", retry_after_s=wait_s)
        if account.requests is not None:
            account.requests.take(1.0, now)
        if account.tokens is not None:
            account.tokens.take(num_prompt_tokens, now)
        account.num_running += 1
        return QuotaUse(account, num_prompt_tokens, block_size, self._clock)

    def _account(self, tenant: str, quota: TenantQuota) -> _Account:
        """A changed quota begins anew, with full buckets; what runs stays counted."""
        known = self._accounts.get(tenant)
        if known is not None and known[0] == quota:
            return known[1]
        now = self._clock()
        account = _Account(
            _bucket(quota.requests_per_minute, now),
            _bucket(quota.tokens_per_minute, now),
            _bucket(quota.block_seconds_per_minute, now),
        )
        self._accounts[tenant] = (quota, account)
        return account


class QuotaUse:
    """One request's account while it runs. `close` it at its end."""

    def __init__(
        self,
        account: _Account,
        num_prompt_tokens: int,
        block_size: int,
        clock: Callable[[], float],
    ) -> None:
        self._account = account
        self._num_prompt_tokens = num_prompt_tokens
        self._block_size = block_size
        self._clock = clock
        self._num_outputs: dict[int, int] = {}
        self._paid_until: float | None = None  # None: it holds no block yet

    def observe(self, deltas: Iterable[OutputDelta]) -> None:
        """Pay for new tokens, and for the blocks held since the last ones."""
        self._pay_blocks()
        for delta in deltas:
            if self._account.tokens is not None:
                self._account.tokens.take(len(delta.token_ids), self._clock())
            num_tokens = self._num_outputs.get(delta.index, 0) + len(delta.token_ids)
            self._num_outputs[delta.index] = num_tokens
            if delta.finish_reason is not None:
                del self._num_outputs[delta.index]

    def close(self) -> None:
        """It is over."""
        self._pay_blocks()
        self._account.num_running -= 1

    def _pay_blocks(self) -> None:
        now = self._clock()
        bucket = self._account.block_seconds
        if bucket is not None and self._paid_until is not None:
            bucket.take(self._num_blocks * (now - self._paid_until), now)
        self._paid_until = now

    @property
    def _num_blocks(self) -> int:
        """Held now: the prompt's, once for all samples, and each sample's own."""
        if not self._num_outputs:
            return 0
        prompt = self._num_prompt_tokens // self._block_size
        tail = self._num_prompt_tokens % self._block_size
        own = sum(-(-(tail + count) // self._block_size) for count in self._num_outputs.values())
        return prompt + own


def _bucket(per_minute: float | None, now: float) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, now)
