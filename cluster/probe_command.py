"""`pagefleet probe`: whether the parts on this machine live, for Kubernetes and the like.

Reads the heartbeats of this machine's processes and asks Ray's agent; needs no key and no
controller, so that neither can get a healthy replica restarted.
"""

import http.client
import time
from collections.abc import Callable
from pathlib import Path

from ..workers.heartbeat import Beat, read_beats
from .config import CommandError

GATEWAY = "gateway-"  # how the names of gateways' heartbeats begin
_AGENT_TIMEOUT_S = 5.0
_AGENT_PATH = "/api/local_raylet_healthz"
_POLL_S = 1.0


def probe_alive(folder: Path, limit_s: float, now: float | None = None) -> str:
    """What lives here. CommandError if any part is frozen or stuck."""
    now = time.monotonic() if now is None else now
    beats = list(read_beats(folder))
    for beat in beats:
        reason = beat.why_stuck(now, limit_s)
        if reason is not None:
            raise CommandError(reason)
    return ", ".join(map(_describe, beats)) or "nothing of ours runs here"


def probe_ready(folder: Path) -> str:
    """Whether a gateway here takes requests. CommandError if not."""
    gateways = [beat for beat in read_beats(folder) if beat.name.startswith(GATEWAY)]
    if not any(beat.pulse.is_ready for beat in gateways):
        raise CommandError("no gateway here is ready")
    return ", ".join(map(_describe, gateways))


def probe_raylet(address: str) -> str:
    """Whether Ray's agent calls its node healthy. CommandError if not."""
    connection = http.client.HTTPConnection(address, timeout=_AGENT_TIMEOUT_S)
    try:
        connection.request("GET", _AGENT_PATH)
        reply = connection.getresponse()
        text = reply.read(500).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        raise CommandError(f"Ray's agent at {address} does not answer: {error}") from error
    finally:
        connection.close()
    if reply.status != http.HTTPStatus.OK:
        raise CommandError(f"Ray's agent at {address} says {reply.status}: {text}")
    return "Ray's node is healthy"


def wait_idle(
    folder: Path,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Until no gateway here carries a request. CommandError if some still does at the end."""
    until = clock() + timeout_s
    while True:
        beats = [beat for beat in read_beats(folder) if beat.name.startswith(GATEWAY)]
        num_running = sum(beat.pulse.num_working for beat in beats)
        if not num_running:
            return "no gateway here carries a request"
        if clock() >= until:
            raise CommandError(f"{num_running} requests still run after {timeout_s:g} s")
        sleep(_POLL_S)


def _describe(beat: Beat) -> str:
    work = beat.pulse.num_working
    return f"{beat.name} is {'idle' if not work else f'busy with {work}'}"
