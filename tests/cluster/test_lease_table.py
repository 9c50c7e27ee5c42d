"""How leases come, are listed, and end."""

from pagefleet.cluster.lease_table import LeaseRecord, LeaseTable
from pagefleet.protos.messages import LeaseUse


def make_record(lease_id: int = 1, slot: int = 0, blocks: int = 5) -> LeaseRecord:
    return LeaseRecord(
        lease_id, slot, blocks, num_blocks=blocks, uncached_tokens=10, expires_at=10.0
    )


def grant(table: LeaseTable, *records: LeaseRecord) -> None:
    for record in records:
        table.grant(record)


def test_a_listed_lease_may_take_what_its_leader_says() -> None:
    table, record = LeaseTable(), make_record()
    grant(table, record)
    change = table.apply_ledger(0, (LeaseUse(1, 3),), ())
    assert change.accepted == (record,) and change.ended == ()
    assert table.promised(0) == 3
    assert table.pop_expired(100.0) == []
    table.check_integrity()


def test_a_lease_ends_when_a_report_no_longer_lists_it() -> None:
    table, record = LeaseTable(), make_record()
    grant(table, record)
    table.apply_ledger(0, (LeaseUse(1, 3),), ())
    change = table.apply_ledger(0, (), ())  # the report that named it finished was lost
    assert change.accepted == () and change.ended == (record,)
    assert len(table) == 0 and table.promised(0) == 0


def test_accepted_and_finished_between_two_reports() -> None:
    table, record = LeaseTable(), make_record()
    grant(table, record)
    change = table.apply_ledger(0, (), (1, 99))
    assert change.accepted == (record,) and change.ended == (record,)
    assert len(table) == 0


def test_a_grant_given_back_counts_until_the_next_report() -> None:
    table, kept, returned = LeaseTable(), make_record(1), make_record(2)
    grant(table, kept, returned)
    table.give_back(returned)
    assert len(table) == 2
    change = table.apply_ledger(0, (), ())
    assert change.ended == (returned,)
    assert list(table) == [kept]


def test_a_grant_given_back_but_accepted_stays_until_its_leader_ends_it() -> None:
    table, record = LeaseTable(), make_record()
    grant(table, record)
    table.give_back(record)
    assert table.apply_ledger(0, (LeaseUse(1, 2),), ()).ended == ()
    assert table.promised(0) == 2


def test_an_unknown_lease_in_a_report_is_adopted() -> None:
    table = LeaseTable()
    table.apply_ledger(0, (LeaseUse(7, 4),), ())
    assert table.promised(0) == 4
    assert table.apply_ledger(0, (), (7,)).ended[0].lease is None


def test_grants_expire_if_no_report_lists_them() -> None:
    table, record = LeaseTable(), make_record()
    grant(table, record)
    assert table.next_expiry() == 10.0
    assert table.pop_expired(9.9) == []
    assert table.pop_expired(10.0) == [record]
    assert len(table) == 0
    table.check_integrity()


def test_void_ends_all_of_one_slot() -> None:
    table = LeaseTable()
    grant(table, make_record(1, 0), make_record(2, 0), make_record(3, 1))
    table.apply_ledger(0, (LeaseUse(1, 5),), ())
    assert {record.lease_id for record in table.void_slot(0)} == {1, 2}
    assert [record.lease_id for record in table] == [3]
    table.check_integrity()
