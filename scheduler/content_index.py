"""What is published: which token content stands in which block, on either tier.

A **content** is one full block of tokens together with everything before it. Knows hashes,
tokens and block ids; nothing of reference counts, eviction order or requests: those are the
pools', which tell the index when a block gains or loses its content.

    hash ──► Content(id, parent ──► Content(…) ──► root)
               ├─ device block, and further device blocks that hold the same
               └─ host block

A hash is fast, not proof. Every content has an id that is never used twice and remembers its
parent's id: a hit needs equal tokens *and* the parent id of the hit before it.
"""

from collections import OrderedDict

from .content import Content, Tier
from .integrity import IntegrityError, check
from .route_residency import RouteResidency

# Roots differ by tenant salt and adapter, which clients choose: the table of them is bounded.
MAX_NUM_ROOTS = 4096
_NOWHERE = [None, None]


class ContentIndex:
    """Finds contents by hash; gives a content its blocks and takes them away.

    capacity: most contents at once, the blocks of both tiers. hash_bits: fewer than 128 only to
    provoke collisions.
    """

    def __init__(self, capacity: int, routes: RouteResidency, hash_bits: int = 128) -> None:
        self._contents: dict[bytes, Content] = {}
        self._unused = [Content() for _ in range(capacity)]
        self._capacity = capacity
        self._roots: OrderedDict[bytes, Content] = OrderedDict()
        self._routes = routes
        self._hash_bits = hash_bits
        self._next_id = 1
        self.num_refused = 0  # contents that collided: not published, or not served

    def __len__(self) -> int:
        return len(self._contents)

    def root(self, root_hash: bytes) -> Content:
        """The content before the first block of every sequence of this identity."""
        root = self._roots.get(root_hash)
        if root is not None:
            self._roots.move_to_end(root_hash)
            return root
        root = Content()
        root.id = self._take_id()
        root.hash = root_hash
        self._roots[root_hash] = root
        if len(self._roots) > MAX_NUM_ROOTS:
            _, oldest = self._roots.popitem(last=False)
            oldest.id = 0  # what was published under it can no longer be reached
        return root

    def lookup(self, root: Content, hashes: list[bytes], blocks: list[bytes]) -> list[Content]:
        """The longest published prefix, on whichever tier. blocks: the token bytes of each."""
        found: list[Content] = []
        append, get = found.append, self._contents.get
        keys = hashes if self._hash_bits == 128 else [self._key(h) for h in hashes]
        for key in keys:
            content = get(key)
            if content is None:
                break
            append(content)
        if not found:
            return found
        # All at once, since all of them are right but when hashes collide.
        tokens = [content.tokens for content in found]
        parents = [root.id, *[content.id for content in found]]
        parents.pop()
        if tokens != blocks[: len(found)] or [c.parent_id for c in found] != parents:
            del found[self._first_refused(root, found, blocks) :]
        return found

    def _first_refused(self, root: Content, found: list[Content], blocks: list[bytes]) -> int:
        """How many of `found` are right: the tokens are equal, and each follows the one before."""
        parent_id = root.id
        for place, content in enumerate(found):
            if content.parent_id != parent_id or content.tokens != blocks[place]:
                self.num_refused += content.is_reachable
                return place
            parent_id = content.id
        return len(found)

    def publish(
        self,
        parent: Content,
        block_hash: bytes,
        tokens: bytes,
        block: int,
        tier: Tier = Tier.DEVICE,
    ) -> Content | None:
        """Say that `block` holds `tokens` after `parent`. None: refused, it collides.

        A block of the host is not taken where another one there holds the same.

        Who is refused must not publish the blocks after it either.
        """
        key = block_hash if self._hash_bits == 128 else self._key(block_hash)
        content = self._contents.get(key)
        if content is None:
            content = self._unused.pop()
            content.id = self._take_id()
            content.hash = block_hash
            content.key = key
            content.tokens = tokens
            content.parent = parent
            content.parent_id = parent.id
            content.blocks[tier] = block
            self._contents[key] = content
            return content
        if content.parent_id != parent.id or content.tokens != tokens:
            self.num_refused += content.is_reachable
            return None
        if tier is Tier.DEVICE or content.blocks[tier] is None:
            self.attach(content, tier, block)
        return content

    def find_unreachable(self, block_hash: bytes) -> Content | None:
        """What stands in the way of publishing this hash though no prefix leads to it."""
        content = self._contents.get(self._key(block_hash))
        return None if content is None or content.is_reachable else content

    def add_stride(self, last: Content, num_blocks: int, route_hash: bytes) -> None:
        """`last` and the contents before it make one stride of the route chain."""
        members: list[Content] = []
        content = last
        for _ in range(num_blocks):
            members.append(content)
            assert content.parent is not None, f"{content} has too few predecessors"
            content = content.parent
        self._routes.add(route_hash, members)

    def attach(self, content: Content, tier: Tier, block: int) -> None:
        """`block` holds it too: found from now on, or in reserve where another one is."""
        if content.blocks[tier] is None:
            content.blocks[tier] = block
            self._routes.arrived(content, tier)
            return
        assert tier is Tier.DEVICE, f"{content} is on the host already"
        if content.duplicates is None:
            content.duplicates = []
        content.duplicates.append(block)

    def detach(self, content: Content, tier: Tier, block: int) -> None:
        """`block` no longer holds it; a duplicate takes over where there is one."""
        blocks, duplicates = content.blocks, content.duplicates
        if blocks[tier] != block:
            assert duplicates is not None, f"{content} has no duplicate {block}"
            duplicates.remove(block)
        elif duplicates and tier is Tier.DEVICE:
            blocks[tier] = duplicates.pop()
        else:
            blocks[tier] = None
            if content.strides is not None:
                self._routes.left(content, tier)
            if blocks[1 - tier] is None:
                self._retire(content)

    def detach_all(self, contents: list[Content | None], tier: Tier, blocks: list[int]) -> None:
        """Take each of `blocks` its content. Those that are in no other block, most of what is
        evicted, go at once. contents: the tier's, by block."""
        known, unused, other = self._contents, self._unused.append, 1 - tier
        evict = self._routes.evicted
        for block in blocks:
            content = contents[block]
            assert content is not None, f"block {block} has no content"
            contents[block] = None
            places = content.blocks
            if content.duplicates or places[other] is not None:
                self.detach(content, tier, block)
                continue
            if content.strides is not None:
                evict(content, tier)
            places[tier] = None
            del known[content.key]
            content.id = 0  # nobody reaches it or its parent through it any more
            unused(content)

    def contents(self) -> list[Content]:
        """Everything published."""
        return list(self._contents.values())

    def check_integrity(self) -> None:
        """Every record is in use or not, and every use is consistent."""
        used = len(self._contents)
        check(
            used + len(self._unused) == self._capacity,
            f"{used} contents + {len(self._unused)} unused != {self._capacity}",
        )
        for key, content in self._contents.items():
            is_known = content.key == key and content.id != 0
            has_first = not content.duplicates or content.blocks[Tier.DEVICE] is not None
            if not is_known or content.blocks == _NOWHERE or not has_first:
                raise IntegrityError(f"{content}, under {key}: {content.duplicates}")

    def _retire(self, content: Content) -> None:
        del self._contents[content.key]
        if content.strides is not None:
            self._routes.retire(content)
        content.id = 0
        content.parent = None
        content.duplicates = None
        self._unused.append(content)

    def _take_id(self) -> int:
        taken = self._next_id
        self._next_id = taken + 1
        return taken

    def _key(self, block_hash: bytes) -> bytes:
        if self._hash_bits == 128:
            return block_hash
        return (int.from_bytes(block_hash) >> (128 - self._hash_bits)).to_bytes(16)
