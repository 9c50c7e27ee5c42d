"""Random histories of the pools, against a plain model of what must be true."""

from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagefleet.scheduler.block_pool import BlockPool
from pagefleet.scheduler.content import Content, Tier
from pagefleet.scheduler.content_index import ContentIndex
from pagefleet.scheduler.host_pool import HostPool, Lookup
from pagefleet.scheduler.route_residency import RouteResidency

NUM_BLOCKS = 6
ROOT = bytes(16)


class DevicePool(RuleBasedStateMachine):
    """Tables come, share, publish and go, with steps and copies in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.index = ContentIndex(NUM_BLOCKS, RouteResidency())
        self.pool = BlockPool(NUM_BLOCKS, self.index)
        self.tables: list[list[int]] = []
        self.step = 0  # the last one launched
        self.finished = 0
        self.fences: dict[int, int] = {}  # block → step it was given back under
        self.pins: Counter[int] = Counter()
        self.names = 0

    def holders(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables)

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        before = self.pool.stats()
        blocks = self.pool.allocate(count)
        if blocks is None:
            assert count > before.free
            assert self.pool.stats() == before
            return
        for block in blocks:
            assert not self.holders(block) and not self.pins[block]
            assert self.fences.get(block, 0) <= self.finished
        if blocks:
            self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.reference(table)
        self.tables.append(list(table))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        in_flight = self.step if self.step > self.finished else 0
        self.pool.release(table, in_flight)
        for block in table:
            if not self.holders(block):
                self.fences[block] = in_flight

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        parent = self.index.root(ROOT)
        for block in table:
            content = self.pool.content(block)
            if content is None:
                self.names += 1
                name = self.names.to_bytes(16)
                content = self.pool.publish(block, parent, name, name)
            assert content is not None
            parent = content

    @precondition(lambda self: len(self.index))
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        contents = self.index.contents()
        content = contents[data.draw(st.integers(0, len(contents) - 1))]
        block = content.blocks[Tier.DEVICE]
        assert block is not None
        self.pool.reference([block])
        self.tables.append([block])

    @rule()
    def launch(self) -> None:
        self.step += 1

    @precondition(lambda self: self.step > self.finished)
    @rule()
    def finish(self) -> None:
        self.finished += 1
        self.pool.finish_step(self.finished)

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def pin(self, block: int) -> None:
        if self.holders(block) or self.pool.count_idle([block]):
            self.pool.pin(block)
            self.pins[block] += 1

    @precondition(lambda self: self.pins.total())
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.pins.elements())))
        self.pool.unpin(block, evict_first=data.draw(st.booleans()))
        self.pins[block] -= 1

    @rule()
    def reset(self) -> None:
        self.pool.unpublish_all()
        assert not len(self.index)

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity()
        self.index.check_integrity()
        assert self.pool.stats().total == NUM_BLOCKS
        for block in range(NUM_BLOCKS):
            assert self.pool.ref_count(block) == self.holders(block)


class TwoTiers(RuleBasedStateMachine):
    """Contents move between a device whose blocks all are published and a small host."""

    def __init__(self) -> None:
        super().__init__()
        self.index = ContentIndex(NUM_BLOCKS + 4, RouteResidency())
        self.device = BlockPool(NUM_BLOCKS, self.index)
        self.host = HostPool(4, self.index)
        parent = self.index.root(ROOT)
        blocks = self.device.allocate(NUM_BLOCKS)
        assert blocks is not None
        for block in blocks:
            name = block.to_bytes(16)
            content = self.device.publish(block, parent, name, name)
            assert content is not None
            parent = content
        self.contents: list[tuple[Content, int]] = [(c, c.id) for c in self.index.contents()]
        self.stores: list[tuple[int, Content, int]] = []
        self.held: list[int] = []

    @rule(place=st.integers(0, NUM_BLOCKS - 1))
    def store(self, place: int) -> None:
        content, content_id = self.contents[place]
        if content.id != content_id or self.host.lookup(content) is not Lookup.MISS:
            return
        blocks = self.host.begin_stores([content])
        if blocks is None:
            assert not self.host.stats().free
            return
        assert self.host.lookup(content) is Lookup.HIT_PENDING
        self.stores.append((blocks[0], content, content_id))
        self.held += blocks

    @precondition(lambda self: self.stores)
    @rule(ok=st.booleans(), data=st.data())
    def end_store(self, ok: bool, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.stores) - 1))
        block, content, content_id = self.stores.pop(place)
        self.host.end_store(block, content, content_id, ok)
        if content.id == content_id:
            assert (self.host.lookup(content) is Lookup.HIT) is ok

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.host.release([block])

    @rule(place=st.integers(0, NUM_BLOCKS - 1), ok=st.booleans())
    def load(self, place: int, ok: bool) -> None:
        content, content_id = self.contents[place]
        if content.id == content_id and self.host.lookup(content) is Lookup.HIT:
            block = self.host.block_of(content)
            self.host.begin_load(block)
            self.host.end_load(block, ok)

    @rule(place=st.integers(0, NUM_BLOCKS - 1))
    def forget_on_device(self, place: int) -> None:
        self.device.unpublish(place)

    @rule()
    def clear(self) -> None:
        self.host.clear()

    @invariant()
    def books_agree(self) -> None:
        for part in (self.device, self.host, self.index):
            part.check_integrity()
        assert self.host.stats().total == 4
        for block, count in Counter(self.held).items():
            assert self.host.ref_count(block) == count


TestDevicePool = DevicePool.TestCase
TestDevicePool.settings = settings(max_examples=60, stateful_step_count=40)
TestTwoTiers = TwoTiers.TestCase
TestTwoTiers.settings = settings(max_examples=60, stateful_step_count=40)
