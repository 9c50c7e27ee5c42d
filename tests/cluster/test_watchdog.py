"""How patient the watchdog is with replicas whose steps take long."""

from cluster_factories import join, make_controller, make_info, tell


def test_patience_follows_the_steps_as_they_are_now():
    """A busy machine makes each step longer: that is no reason to kill a replica."""
    controller = make_controller(watchdog_s=5.0)
    replica = join(controller, make_info("r0", decode_step_s=0.01))
    tell(controller, replica, 1.0, num_running=1, step_p99_s=0.5)
    for now in (5.0, 10.0):
        tell(controller, replica, now, num_running=1, step_p99_s=0.5)
        assert controller.tick(now) == ()
    tell(controller, replica, 10.5, num_running=1, step_p99_s=0.5)
    (dead,) = controller.tick(11.5)
    assert dead.replica_id == "r0"


def test_a_replica_that_is_quick_again_gets_no_more_patience_than_others():
    controller = make_controller(watchdog_s=5.0)
    replica = join(controller, make_info("r0"))
    tell(controller, replica, 1.0, num_running=1, step_p99_s=2.0)
    replica.steps += 1
    tell(controller, replica, 2.0, num_running=1, step_p99_s=0.01)
    tell(controller, replica, 7.0, num_running=1, step_p99_s=0.01)
    assert len(controller.tick(7.5)) == 1
