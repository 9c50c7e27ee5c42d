"""What a failed `check_integrity()` raises."""


class IntegrityError(AssertionError):
    """The books of a pool, queue or batch contradict each other: a bug of ours, never a user's."""


def check(condition: bool, message: str) -> None:
    """Raise IntegrityError unless `condition` holds. `message` carries the state."""
    if not condition:
        raise IntegrityError(message)
