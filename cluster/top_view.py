"""What `pagefleet top` shows: the dashboard's parts in a terminal.

Keeps what updates leave out (maps and decisions told before), and draws the whole anew for each.
Knows public messages and rich; no connection, no keyboard.
"""

from collections import deque
from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..protos import inference_pb2 as pb
from ..scheduler.block_map import BlockState
from .status_view import replica_table
from .tables import make_table

# state → its colour and its sign, so that it can be told apart without colours
_CELLS = {
    BlockState.CLEAN: ("bright_black", "."),
    BlockState.CACHED: ("yellow", "+"),
    BlockState.REFERENCED: ("green", "#"),
    BlockState.SHARED: ("cyan", "%"),
    BlockState.FENCED: ("red", "!"),
    BlockState.HOST: ("magenta", "h"),
}
_KINDS = {"grant": "green", "wait": "yellow", "refuse": "red", "expire": "red"}
_LEVELS = " ▁▂▃▄▅▆▇█"
_HISTORY = 60
_MAX_DECISIONS = 64
_CHROME = 14  # lines of titles and of what is always there


class TopView:
    """The screen of one watcher."""

    def __init__(self) -> None:
        self._maps: dict[tuple[str, str], pb.PoolMap] = {}
        self._decisions: deque[pb.Decision] = deque(maxlen=_MAX_DECISIONS)
        self._tokens: deque[float] = deque(maxlen=_HISTORY)

    def take(self, update: pb.ClusterUpdate) -> None:
        """The next message of the stream."""
        present = {replica.replica_id for replica in update.state.replicas}
        self._maps = {key: known for key, known in self._maps.items() if key[0] in present}
        self._maps |= {(pool.replica_id, pool.tier): pool for pool in update.pools}
        newest = update.decisions[-1].number if update.decisions else None
        if newest is not None and self._decisions and newest < self._decisions[-1].number:
            self._decisions.clear()  # another controller has begun
        self._decisions.extend(update.decisions)
        self._tokens.append(update.rates.tokens_per_s)

    def draw(self, update: pb.ClusterUpdate, width: int = 120, height: int = 50) -> Group:
        """All of it, in about so many columns and lines: what has no room is counted."""
        num_replicas = len(update.state.replicas)
        rows = max(height - _CHROME - min(num_replicas, 8), 12)
        return Group(
            _first_rows(update.state, 8),
            Text(),
            self._pools(update.state, width, max(4, rows // 3)),
            _legend(),
            Text(),
            self._rates(update),
            Text(),
            self._decision_table(max(3, rows // 4), width),
            Text(),
            _queue_table(update, max(2, rows // 6)),
            Text(),
            _lease_table(update, max(2, rows // 6)),
        )

    def _pools(self, state: pb.GetClusterStateResponse, width: int, most: int) -> Table:
        """One row a pool: its blocks in the order of their ids, squeezed into one line."""
        table = make_table(("pool", "in use", "total", ""))
        table.columns[-1].justify = "left"
        pools = [
            (replica.replica_id, name, tier)
            for replica in state.replicas
            for name, tier in (("device", replica.device), ("host", replica.host))
            if tier.total
        ]
        cells = max(width - 44, 20)
        for replica_id, name, tier in pools[:most]:
            used = (tier.referenced + tier.fenced) / tier.total
            label = replica_id if name == "device" else f"{replica_id} host"
            known = self._maps.get((replica_id, name))
            bar = Text("…") if known is None else strip(known.cells, cells)
            table.add_row(label, f"{used:.0%}", f"{tier.total:,}", bar)
        if len(pools) > most:
            table.add_row(f"and {len(pools) - most} more")
        return table

    def _rates(self, update: pb.ClusterUpdate) -> Text:
        rates, state = update.rates, update.state
        found = f"{rates.hit_tokens / rates.query_tokens:.0%}" if rates.query_tokens else "-"
        ttft = "-"
        if rates.HasField("ttft_p50_s"):
            ttft = f"{1e3 * rates.ttft_p50_s:,.0f} ms, p99 {1e3 * rates.ttft_p99_s:,.0f} ms"
        line = Text(f"{rates.tokens_per_s:,.0f} tokens/s ")
        line.append(sparkline(self._tokens), style="cyan")
        line.append(f"  first token p50 {ttft}  prefix hits {found}\n")
        line.append(
            f"controller ({state.policy}): {state.queued_requests} requests waiting, "
            f"{state.granted:,} granted, {state.refused:,} refused, {state.expired:,} expired"
        )
        return line

    def _decision_table(self, most: int, width: int) -> Table:
        headers = ("decision", "request", "tenant", "replica", "cached", "why")
        table = _left(make_table(headers), 4)
        table.columns[-1].justify = "left"
        for decision in list(self._decisions)[: -most - 1 : -1]:
            table.add_row(
                Text(decision.decision, style=_KINDS.get(decision.decision, "")),
                _short(decision.request_id or decision.request_key),
                _short(decision.tenant),
                decision.replica_id,
                f"{decision.hit_tokens:,} of {decision.num_tokens:,}",
                _why(decision)[: max(width - 78, 20)],
            )
        return table


def strip(cells: bytes, width: int) -> Text:
    """A map in one line: each character the state that most of its cells are in."""
    line = Text()
    num_signs = min(width, len(cells))
    for sign in range(num_signs):
        first, end = sign * len(cells) // num_signs, (sign + 1) * len(cells) // num_signs
        run = [cell & 7 for cell in cells[first:end]]
        state = max(reversed(BlockState), key=run.count)
        colour, character = _CELLS[state]
        line.append(character, style=colour)
    return line


def sparkline(values: Sequence[float]) -> str:
    """The values as bars, the largest one full."""
    most = max(values, default=0.0)
    if most <= 0.0:
        return ""
    return "".join(_LEVELS[round(value / most * (len(_LEVELS) - 1))] for value in values)


def _first_rows(state: pb.GetClusterStateResponse, most: int) -> Table:
    if len(state.replicas) <= most:
        return replica_table(state)
    shown = pb.GetClusterStateResponse(replicas=state.replicas[:most])
    table = replica_table(shown)
    table.add_row(f"and {len(state.replicas) - most} more")
    return table


def _legend() -> Text:
    line = Text()
    for state, (colour, character) in _CELLS.items():
        line.append(f"{character} ", style=colour)
        line.append(f"{state.name.lower()}  ", style="bright_black")
    return line


def _queue_table(update: pb.ClusterUpdate, most: int) -> Table:
    table = _left(make_table(("waits", "tenant", "class", "tokens", "blocks", "s")), 3)
    for waiting in update.waiting[:most]:
        table.add_row(
            _short(waiting.request_id or waiting.request_key),
            _short(waiting.tenant),
            waiting.admission_class,
            f"{waiting.num_tokens:,}",
            f"{waiting.num_blocks:,}",
            f"{waiting.waited_s:.1f}",
        )
    return table


def _lease_table(update: pb.ClusterUpdate, most: int) -> Table:
    headers = (f"leases: {update.num_leases:,}", "tenant", "replica", "may take", "s")
    table = _left(make_table(headers), 3)
    for lease in update.leases[:most]:
        table.add_row(
            _short(lease.request_id or lease.request_key),
            _short(lease.tenant),
            lease.replica_id,
            f"{lease.remaining_blocks:,} of {lease.num_blocks:,}",
            f"{lease.age_s:.1f}",
        )
    return table


def _left(table: Table, count: int) -> Table:
    """So many columns of words, before those of numbers."""
    for column in table.columns[:count]:
        column.justify = "left"
    return table


def _why(decision: pb.Decision) -> str:
    if len(decision.replicas) < 2 or not decision.replica_id:
        return decision.reason
    mine, other = decision.replicas[:2]
    return f"{mine.total_ms:,.0f} ms; {other.total_ms:,.0f} on {other.replica_id}"


def _short(name: str) -> Text:
    """A client's word, as text whatever it is, in one short line."""
    printable = "".join(character if character.isprintable() else "?" for character in name)
    return Text(printable if len(printable) <= 24 else printable[:23] + "…")
