"""`pagefleet serve` as a process of its own, as a user starts it: its first line and its end."""

import json
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PAGEFLEET = str(Path(sys.executable).parent / "pagefleet")
_STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Serving:
    """A cluster that is ready."""

    pid: int
    grpc: str
    http: str


@contextmanager
def serving(model: Path, *flags: str) -> Generator[Serving]:
    """Until the block ends. Any free ports; on the CPU."""
    command = [PAGEFLEET, "serve", "--model", str(model), "--device", "cpu", "--json"]
    command += ["--grpc-port", "0", "--http-port", "0", *flags]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"did not start: {' '.join(command)}")
            facts = json.loads(line)
            yield Serving(process.pid, facts["grpc"], facts["http"])
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
