"""Requests to replay: traces read from files, and a synthetic generator. Knows no cluster.

A trace file is JSON lines, gzipped or not:
    {"t": milliseconds, "in": prompt tokens, "out": output tokens, "h": [[first id, count], …]}
`h` are the ids of the prompt's 512-token pieces, chained: equal ids mean equal tokens up to and
including that piece; the last piece may be partial. Without `h` no two prompts share anything.
"""

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..protos.messages import AdmissionClass
from ..scheduler.output import Int32Array

PIECE_TOKENS = 512
_SMEAR_S = 3.0
_MAX_TOKEN_IDS = 2**31 // PIECE_TOKENS


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. pieces: runs (first id, count) of 512-token pieces."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    pieces: tuple[tuple[int, int], ...]
    tenant: str = ""
    admission_class: AdmissionClass = AdmissionClass.STANDARD

    def prompt(self) -> Int32Array:
        """The prompt's tokens, int32 [num_prompt_tokens]: equal pieces give equal tokens."""
        runs = [
            np.arange(first * PIECE_TOKENS, (first + count) * PIECE_TOKENS, dtype=np.int32)
            for first, count in self.pieces
        ]
        return np.concatenate(runs)[: self.num_prompt_tokens]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival."""

    name: str
    requests: tuple[TraceRequest, ...]

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    @property
    def prompt_tokens_per_s(self) -> float:
        """Mean rate of prompt tokens."""
        tokens = sum(request.num_prompt_tokens for request in self.requests)
        return tokens / max(self.duration_s, 1e-9)

    def at_rate(self, prompt_tokens_per_s: float) -> "Workload":
        """The same requests, arriving so much faster or slower."""
        factor = self.prompt_tokens_per_s / prompt_tokens_per_s
        start = self.requests[0].arrival_s
        return Workload(
            self.name,
            tuple(
                replace(request, arrival_s=(request.arrival_s - start) * factor)
                for request in self.requests
            ),
        )

    def ideal_hit_rate(self) -> float:
        """Share of prompt tokens that a cache of unlimited size, shared by all, would hold."""
        seen: set[int] = set()
        hits = total = 0
        for request in self.requests:
            total += request.num_prompt_tokens
            known = 0
            unbroken = True
            for piece in _pieces(request):
                unbroken = unbroken and piece in seen
                known += unbroken
                seen.add(piece)
            hits += min(known * PIECE_TOKENS, request.num_prompt_tokens - 1)
        return hits / total


def _pieces(request: TraceRequest) -> Iterator[int]:
    for first, count in request.pieces:
        yield from range(first, first + count)


def load_trace(path: Path, *, seed: int = 0) -> Workload:
    """Read a trace; times that come in steps of 3 s are spread inside their step."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    if not rows:
        raise ValueError(f"{path} holds no request")
    own_piece = max((first + count for row in rows for first, count in row.get("h", ())), default=0)
    requests: list[TraceRequest] = []
    for row in rows:
        pieces = tuple((int(first), int(count)) for first, count in row.get("h", ()))
        if not pieces:
            count = -(-int(row["in"]) // PIECE_TOKENS)
            pieces = ((own_piece, count),)
            own_piece += count
        requests.append(TraceRequest(row["t"] / 1e3, int(row["in"]), int(row["out"]), pieces))
    if own_piece >= _MAX_TOKEN_IDS:
        requests = _renumbered(requests)
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    return Workload(name, tuple(_smeared(requests, random.Random(seed))))


def _renumbered(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Piece ids counted from 0, so that their tokens fit 32 bits."""
    numbers: dict[int, int] = {}
    renumbered: list[TraceRequest] = []
    for request in requests:
        pieces = tuple((numbers.setdefault(piece, len(numbers)), 1) for piece in _pieces(request))
        renumbered.append(replace(request, pieces=pieces))
    return renumbered


def _smeared(requests: list[TraceRequest], rng: random.Random) -> list[TraceRequest]:
    steps = {round(request.arrival_s * 10) for request in requests}
    if any(min(step % 30, -step % 30) > 1 for step in steps):
        return sorted(requests, key=lambda request: request.arrival_s)
    spread = [
        replace(request, arrival_s=request.arrival_s + rng.uniform(0.0, _SMEAR_S))
        for request in requests
    ]
    return sorted(spread, key=lambda request: request.arrival_s)


@dataclass(frozen=True, slots=True)
class SyntheticSpec:
    """A workload of conversations that share system prompts.

    Each conversation takes one of `num_system_prompts` and adds a turn of about `turn_tokens` a
    few times, `think_s` apart; outputs have about `output_tokens`. Lengths are log-normal.
    tenants: conversations belong to them in turn.
    """

    num_requests: int = 1000
    requests_per_s: float = 10.0
    num_system_prompts: int = 8
    system_tokens: int = 1024
    turn_tokens: int = 512
    turns: int = 4
    think_s: float = 10.0
    output_tokens: int = 200
    spread: float = 0.6
    tenants: tuple[str, ...] = ("",)
    seed: int = 0


def synthetic(spec: SyntheticSpec) -> Workload:
    """Conversations with Poisson starts."""
    rng = random.Random(spec.seed)
    next_piece = 0

    def fresh(tokens: int) -> tuple[int, int]:
        nonlocal next_piece
        first, count = next_piece, max(1, round(tokens / PIECE_TOKENS))
        next_piece += count
        return first, count

    systems = [fresh(spec.system_tokens) for _ in range(spec.num_system_prompts)]
    requests: list[TraceRequest] = []
    start = 0.0
    number = 0
    while len(requests) < spec.num_requests:
        start += rng.expovariate(spec.requests_per_s / spec.turns)
        tenant = spec.tenants[number % len(spec.tenants)]
        number += 1
        pieces = (rng.choice(systems),)
        arrival = start
        for _ in range(spec.turns):
            pieces = (*pieces, fresh(_log_normal(rng, spec.turn_tokens, spec.spread)))
            tokens = sum(count for _, count in pieces) * PIECE_TOKENS
            tokens -= rng.randrange(PIECE_TOKENS - 1)
            output = max(1, _log_normal(rng, spec.output_tokens, spec.spread))
            requests.append(TraceRequest(arrival, tokens, output, pieces, tenant))
            arrival += rng.expovariate(1.0 / spec.think_s)
    requests.sort(key=lambda request: request.arrival_s)
    return Workload("synthetic", tuple(requests[: spec.num_requests]))


def _log_normal(rng: random.Random, median: float, spread: float) -> int:
    return max(1, round(median * rng.lognormvariate(0.0, spread)))
