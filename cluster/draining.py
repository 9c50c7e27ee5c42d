"""How long the streams of a draining replica may go on, unless told otherwise."""

DRAIN_S = 30.0
LAST_DRAIN_S = 600.0  # where no other replica has its weights, so that they cannot move
