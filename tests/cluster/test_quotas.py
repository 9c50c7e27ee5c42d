"""Buckets on a clock of the test's own."""

import pytest

from pagefleet.cluster.api_keys import TenantQuota
from pagefleet.cluster.generation import OutputDelta
from pagefleet.cluster.quotas import Bucket, Quotas
from pagefleet.protos.errors import Overloaded
from pagefleet.protos.messages import FinishReason


class Books:
    """Quotas of one tenant."""

    def __init__(self, **quota: float) -> None:
        self.now = 0.0
        self.quota = TenantQuota(**quota)
        self.quotas = Quotas(lambda: self.now)

    def admit(self, num_prompt_tokens: int = 8):
        return self.quotas.admit("a", self.quota, num_prompt_tokens, block_size=4)

    def retry_after(self, num_prompt_tokens: int = 8) -> float | None:
        with pytest.raises(Overloaded, match="over quota") as caught:
            self.admit(num_prompt_tokens)
        return caught.value.retry_after_s


def test_bucket_fills_up_to_a_minutes_worth():
    bucket = Bucket(60.0, 0.0)
    bucket.take(90.0, 0.0)
    assert bucket.wait_s(1.0, 0.0) == pytest.approx(31.0)
    assert bucket.wait_s(1.0, 31.0) == 0.0
    assert bucket.wait_s(1000.0, 1000.0) == 0.0  # more than fits waits for all that fits


def test_requests_per_minute():
    books = Books(requests_per_minute=2)
    books.admit()
    books.admit()
    assert books.retry_after() == pytest.approx(30.0)
    books.now = 30.0
    books.admit()


def test_tokens_are_paid_as_they_come():
    books = Books(tokens_per_minute=60)
    use = books.admit(20)
    use.observe([OutputDelta(0, token_ids=tuple(range(50)))])
    assert books.retry_after(20) == pytest.approx(30.0)  # 10 in debt


def test_concurrent_requests():
    books = Books(max_concurrent_requests=1)
    use = books.admit()
    assert books.retry_after() == 1.0
    use.close()
    books.admit()


def test_block_seconds_count_the_prompt_once_and_each_sample():
    books = Books(block_seconds_per_minute=60)
    use = books.admit(8)
    use.observe([OutputDelta(0, token_ids=(1,)), OutputDelta(1, token_ids=(1,))])
    books.now = 10.0  # 2 blocks of prompt + one for each sample, 10 s
    use.observe([OutputDelta(1, finish_reason=FinishReason.STOP)])
    books.now = 20.0  # 3 blocks, 10 s; 10 came back each time, up to 60 in all: nothing is left
    use.close()
    assert books.retry_after() == pytest.approx(1.0)


def test_tenants_do_not_share():
    books = Books(requests_per_minute=1)
    books.admit()
    books.quotas.admit("b", books.quota, 8, 4)
