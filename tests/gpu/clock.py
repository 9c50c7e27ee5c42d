"""Timing on a device, and what a check found: rows of a table that says what was reached."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Finding:
    """One figure or comparison. target: what has to be reached, None = only told.

    value: a share of what the machine itself was measured to do, unless the unit says otherwise.
    """

    part: str
    case: str
    value: float
    unit: str
    target: float | None = None
    at_most: bool = False  # the target is an upper bound
    note: str = ""

    @property
    def passed(self) -> bool:
        if self.target is None:
            return True
        return self.value <= self.target if self.at_most else self.value >= self.target


@dataclass(slots=True)
class Report:
    """All findings, in order, and what was left out and why."""

    findings: list[Finding] = field(default_factory=list[Finding])
    skipped: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, finding: Finding) -> None:
        """Print it as it comes: a script that is cut off has said what it knew."""
        self.findings.append(finding)
        verdict = "" if finding.target is None else ("  ok" if finding.passed else "  MISSED")
        bound = ""
        if finding.target is not None:
            bound = f" ({'at most' if finding.at_most else 'at least'} {finding.target:g})"
        print(
            f"{finding.part:<10}{finding.case:<58}{finding.value:>12.4g} {finding.unit}"
            f"{bound}{verdict}  {finding.note}",
            flush=True,
        )

    @property
    def num_missed(self) -> int:
        return sum(not finding.passed for finding in self.findings)


class Clock:
    """Seconds per call of a function on the device: by its own events, or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def best(self, run: Callable[[], object], repeats: int = 5, inner: int = 4) -> float:
        """The least of `repeats` means over `inner` calls, after one call to warm up."""
        if self.device.type != "cuda":
            return self._mean(run, 1)  # a rehearsal: its figures mean nothing
        run()
        self.wait()
        return min(self._mean(run, inner) for _ in range(repeats))

    def _mean(self, run: Callable[[], object], inner: int) -> float:
        if self.device.type != "cuda":
            began = time.perf_counter()
            for _ in range(inner):
                run()
            return (time.perf_counter() - began) / inner
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(inner):
            run()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3 / inner
