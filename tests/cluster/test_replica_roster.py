"""Who is there, who is dead for good, and who is found to have stopped."""

from cluster_factories import join, make_controller, make_info, tell

from pagefleet.cluster.replica_roster import ReplicaRoster


def make_roster(*names: str, watchdog_s: float = 5.0):
    """A roster of replicas that have reported at time 0, and those replicas."""
    controller, roster = make_controller(), ReplicaRoster(watchdog_s)
    replicas = {name: join(controller, make_info(name)) for name in names}
    (pool,) = controller.pools().values()
    for view in pool.pool.replicas.values():
        roster.add(pool, view)
    return controller, roster, replicas


def found(roster: ReplicaRoster, now: float) -> list[str]:
    return [info.replica_id for info in roster.find_dead(now)]


def test_a_member_is_known_by_its_incarnation() -> None:
    _, roster, _ = make_roster("r0", "r1")
    assert len(roster) == len(list(roster)) == 2
    member = roster.get("r0", "a")
    assert member is not None and member is roster.get("r0")
    assert roster.get("r0", "b") is None and roster.get("r9") is None
    assert roster.remove("r0") is member
    assert roster.get("r0") is None


def test_the_dead_are_remembered_and_not_for_ever() -> None:
    roster = ReplicaRoster(5.0)
    roster.bury(make_info("r0", "a"))
    assert roster.is_dead("r0", "a") and not roster.is_dead("r0", "b")
    for number in range(2000):
        roster.bury(make_info(f"other-{number}"))
    assert not roster.is_dead("r0", "a") and roster.is_dead("other-1999", "a")


def test_who_is_silent_is_found() -> None:
    controller, roster, replicas = make_roster("r0", "r1")
    assert found(roster, 4.0) == []
    tell(controller, replicas["r1"], 4.0)
    assert found(roster, 5.5) == ["r0"]


def test_who_has_work_and_does_not_move_is_found_although_it_reports() -> None:
    controller, roster, replicas = make_roster("r0")
    tell(controller, replicas["r0"], 4.0, num_waiting=1)
    assert found(roster, 5.5) == ["r0"]
    tell(controller, replicas["r0"], 5.6, num_waiting=1, steps_done=1)
    assert found(roster, 6.0) == []


def test_long_steps_are_given_their_time() -> None:
    controller, roster, replicas = make_roster("r0")
    tell(controller, replicas["r0"], 4.0, num_waiting=1, step_p99_s=1.0)
    assert found(roster, 19.9) == []  # twenty of its steps
    assert found(roster, 24.5) == ["r0"]


def test_nobody_is_looked_at_more_than_ten_times_a_second() -> None:
    _, roster, _ = make_roster("r0")
    assert found(roster, 4.95) == []
    assert found(roster, 5.02) == []  # it is dead by now, and was looked at just before
    assert found(roster, 5.06) == ["r0"]
