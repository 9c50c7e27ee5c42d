"""What the command line was told."""


class CommandError(Exception):
    """A command cannot go on; the message says why and what the user can do."""
