"""Prefixes that other replicas are reading from the host tier: pinned until they say so, or until
their time is up.

Knows contents, both tiers and time as it is told; not who reads, nor how the bytes travel. What is
only on the device is stored on the host first.

    open ─► stores, if any ─► on_ready(blocks) ─► read elsewhere ─► close: held all the while?
               └ failed ─► on_ready(())               └ time is up, or a cache reset: no
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

from .block_hash import extend_chain
from .block_pool import BlockPool
from .config import SchedulerConfig
from .content import Content
from .content_index import ContentIndex
from .host_pool import HostPool, Lookup
from .host_tier import HostTier

MAX_NUM_EXPORTS = 8

OnReady = Callable[[tuple[int, ...]], None]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The full blocks at the beginning of a sequence, as one replica names them to another.

    root_hash: of the pool chain; it says all that KV depends on besides tokens.
    token_bytes: int32 little-endian, block after block.
    """

    root_hash: bytes
    token_bytes: bytes

    def blocks(self, block_size: int) -> list[bytes]:
        """The bytes of each block."""
        width, data = 4 * block_size, self.token_bytes
        return [data[end - width : end] for end in range(width, len(data) + 1, width)]


@dataclass(slots=True, eq=False)
class _Export:
    """num_open: stores that are still to end. is_void: not to be trusted any more."""

    id: int
    blocks: list[int]
    expires_at: float
    on_ready: OnReady
    num_open: int = 0
    is_void: bool = False


@dataclass(slots=True)
class ExportCounts:
    """Since the start. refused: nothing there, no room, or too many at once; expired: not closed
    in time."""

    opened: int = 0
    refused: int = 0
    expired: int = 0
    blocks: int = 0


class PrefixExports:
    """The open exports of one replica; no more of the host tier than half is pinned by them."""

    def __init__(
        self,
        config: SchedulerConfig,
        index: ContentIndex,
        device: BlockPool,
        host: HostPool,
        tier: HostTier,
    ) -> None:
        self._block_size = config.block_size
        self._index = index
        self._device = device
        self._host = host
        self._tier = tier
        self._exports: dict[int, _Export] = {}
        self._num_opened = 0
        self.counts = ExportCounts()

    def __len__(self) -> int:
        return len(self._exports)

    def open(
        self, prefix: SharedPrefix, first: int, now: float, ttl_s: float, on_ready: OnReady
    ) -> int | None:
        """Pin what is here of a prefix, from its block number `first` on, for at most `ttl_s`.

        on_ready: told the host blocks once all of them can be read, in order; none if a store
        failed. None: refused.
        """
        contents = self._find(prefix, first)
        held = self._hold(contents) if len(self._exports) < MAX_NUM_EXPORTS else None
        if held is None:
            self.counts.refused += 1
            return None
        self._num_opened += 1
        export = _Export(self._num_opened, held, now + ttl_s, on_ready)
        self._exports[export.id] = export
        export.num_open = self._tier.watch(
            contents[: len(held)], lambda ok: self._stored(export, ok)
        )
        self.counts.opened += 1
        self.counts.blocks += len(held)
        if not export.num_open:
            on_ready(tuple(held))
        return export.id

    def close(self, export_id: int) -> bool:
        """Let go. Whether the blocks were held, and meant what they should, all the while."""
        export = self._exports.pop(export_id, None)
        if export is None:
            return False
        self._host.release(export.blocks)
        return not export.is_void and not export.num_open

    def expire(self, now: float) -> None:
        """Let go of what was not closed in time."""
        for export in [e for e in self._exports.values() if e.expires_at <= now]:
            self.counts.expired += 1
            self.close(export.id)

    def void(self) -> None:
        """The cache is reset: what is being read may not be used."""
        for export in self._exports.values():
            export.is_void = True

    def hottest(self) -> list[SharedPrefix]:
        """What was used last, as whole prefixes, hottest first: no more blocks in all than could
        be exported at once."""
        limit = self._host.num_blocks // 2
        chosen: dict[int, Content] = {}
        inner: set[int] = set()  # what another one that was chosen follows
        for content in chain(self._device.most_recent(), self._host.most_recent()):
            path = _path_to(content, chosen)
            if len(chosen) + len(path) > limit:
                break
            chosen.update((step.id, step) for step in path)
            inner.update(step.parent_id for step in path)
        return [_prefix_of(c) for number, c in chosen.items() if number not in inner]

    def held_blocks(self) -> Iterable[int]:
        """Host blocks by export: one reference each."""
        for export in self._exports.values():
            yield from export.blocks

    def _find(self, prefix: SharedPrefix, first: int) -> list[Content]:
        blocks = prefix.blocks(self._block_size)
        root = self._index.root(prefix.root_hash)
        return self._index.lookup(root, extend_chain(prefix.root_hash, blocks), blocks)[first:]

    def _hold(self, contents: list[Content]) -> list[int] | None:
        """A reference to a host block for each, or for those that are there where there is no
        room for more. None: for none of them."""
        room = self._host.num_blocks // 2 - sum(len(e.blocks) for e in self._exports.values())
        contents = contents[: max(0, room)]
        held = self._tier.hold(contents)
        if held is None:
            count = 0
            while self._host.lookup(contents[count]) is not Lookup.MISS:
                count += 1
            held = self._tier.hold(contents[:count])
        return held or None

    def _stored(self, export: _Export, ok: bool) -> None:
        export.num_open -= 1
        export.is_void |= not ok
        if not export.num_open and self._exports.get(export.id) is export:
            export.on_ready(() if export.is_void else tuple(export.blocks))


def _path_to(content: Content, known: dict[int, Content]) -> list[Content]:
    """What is not known yet of the prefix that ends with it; nothing where that is broken."""
    path: list[Content] = []
    step = content
    while step.parent is not None and step.id not in known:
        if not step.is_reachable:
            return []
        path.append(step)
        step = step.parent
    return path


def _prefix_of(content: Content) -> SharedPrefix:
    tokens: list[bytes] = []
    step = content
    while step.parent is not None:
        tokens.append(step.tokens)
        step = step.parent
    return SharedPrefix(step.hash, b"".join(reversed(tokens)))
