"""How the command line shows a cluster: its replicas, and the blocks of their pools.

Knows the public message of `GetClusterState` and rich.
"""

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..protos import inference_pb2 as pb
from .tables import make_table

_BAR_WIDTH = 24
# state of a block → its colour and its sign, so that it can be told apart without colours
_STATES = {
    "referenced": ("green", "#"),
    "cached_idle": ("yellow", "+"),
    "fenced": ("red", "!"),
    "clean": ("bright_black", "."),
}


def message_as_json(message: Message) -> dict[str, object]:
    """A message with its field names and zeros."""
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def status_view(state: pb.GetClusterStateResponse) -> Group:
    """Replicas, pools, and the controller's queue."""
    queue = Text(
        f"controller ({state.policy}): {state.queued_requests} requests waiting, "
        f"{state.granted:,} granted, {state.refused:,} refused, {state.expired:,} expired"
    )
    return Group(replica_table(state), Text(), pool_table(state), Text(), queue)


def replica_table(state: pb.GetClusterStateResponse) -> Table:
    """One row a replica: what it does. The model only where there is more than one, guesses only
    where there are some, weights only once they have been updated."""
    has_models = len({replica.model for replica in state.replicas}) > 1
    has_drafts = any(replica.draft_tokens for replica in state.replicas)
    has_transfers = any(r.transfers_done or r.transfers_failed for r in state.replicas)
    has_versions = any(replica.weights_version for replica in state.replicas)
    headers = ["replica", "state", "running", "waiting", "leased", "prefix hits", "preempted"]
    headers += ["guessed right"] * has_drafts + ["prefixes copied"] * has_transfers
    headers += ["weights"] * has_versions
    headers += ["model"] * has_models
    table = make_table(headers)
    for replica in state.replicas:
        row = (
            replica.replica_id,
            replica.state,
            str(replica.num_running),
            str(replica.num_waiting),
            f"{replica.leased_blocks:,}",
            f"{replica.hit_tokens:,} of {replica.query_tokens:,}",
            str(replica.preemptions),
        )
        guesses = f"{replica.accepted_tokens:,} of {replica.draft_tokens:,}"
        version = str(replica.weights_version)
        copied = f"{replica.transfers_done:,}, {replica.transferred_bytes / 2**20:,.0f} MiB"
        optional = [guesses] * has_drafts + [copied] * has_transfers + [version] * has_versions
        table.add_row(*row, *optional, *[replica.model] * has_models)
    return table


def pool_table(state: pb.GetClusterStateResponse) -> Table:
    """One row a tier of a replica: its blocks by state, as numbers and as a bar."""
    table = make_table(("pool", "clean", "cached", "referenced", "fenced", "total", "blocks"))
    for replica in state.replicas:
        for name, tier in (("", replica.device), (" host", replica.host)):
            if tier.total:
                counts = (tier.clean, tier.cached_idle, tier.referenced, tier.fenced, tier.total)
                numbers = [f"{count:,}" for count in counts]
                table.add_row(f"{replica.replica_id}{name}", *numbers, _bar(tier))
    return table


def _bar(tier: pb.TierState) -> Text:
    """Shares of the pool; a state that has any block has at least one cell."""
    bar = Text()
    for name, (colour, sign) in _STATES.items():
        count = int(getattr(tier, name))
        cells = max(round(_BAR_WIDTH * count / tier.total), 1) if count else 0
        if name == "clean":
            cells = max(_BAR_WIDTH - len(bar), 0) if count else 0
        bar.append(sign * cells, style=colour)
    return bar


def leftover_blocks(state: pb.GetClusterStateResponse) -> int:
    """Blocks that are neither clean nor kept for reuse: 0 while nothing runs."""
    return sum(
        tier.referenced + tier.fenced
        for replica in state.replicas
        for tier in (replica.device, replica.host)
    )
