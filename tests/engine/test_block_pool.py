"""Free blocks: vLLM's queue, ranked eviction, runs of neighbours; against plain lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sim.engine.block_pool import BlockPool, FreeQueue
from sim.engine.eviction import RankedPool
from sim.engine.runs import FreeRuns
from sim.protocols import EvictionPolicy


def test_free_queue_takes_front_and_takes_back_at_both_ends():
    queue = FreeQueue(range(1, 6))
    assert queue.take(3) == [1, 2, 3]
    queue.put(unnamed=[3, 1], named=[2])
    assert list(queue) == [3, 1, 4, 5, 2]
    queue.remove(5)
    assert queue.take(4) == [3, 1, 4, 2]
    assert not queue.fits(1)


class OldestFirst(EvictionPolicy):
    """The order of vLLM's queue, spelled out."""


class Pools(RuleBasedStateMachine):
    """A ranked pool whose order is the time of freeing behaves as vLLM's queue."""

    def __init__(self):
        super().__init__()
        self.pools = [BlockPool(9), RankedPool(9, OldestFirst())]
        self.tables: list[list[int]] = []
        self.names = 0

    @rule(count=st.integers(1, 4))
    def take(self, count):
        if self.pools[0].free.fits(count):
            taken = [pool.take(count) for pool in self.pools]
            assert taken[0] == taken[1]
            self.tables.append(taken[0])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def register(self, data):
        table = data.draw(st.sampled_from(self.tables))
        for depth, block in enumerate(table):
            if self.pools[0].names[block] is None:
                self.names += 1
                for pool in self.pools:
                    pool.register(block, self.names, depth)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        for pool in self.pools:
            pool.release(reversed(table))

    @rule(data=st.data())
    def hit(self, data):
        named = [b for b, n in enumerate(self.pools[0].names) if n is not None]
        if named:
            block = data.draw(st.sampled_from(named))
            for pool in self.pools:
                pool.touch([block])
            self.tables.append([block])

    @invariant()
    def books_agree(self):
        assert list(self.pools[0].free) == list(self.pools[1].free)
        for pool in self.pools:
            pool.check_integrity(self.tables)


TestPools = Pools.TestCase


class MostHitsLast(EvictionPolicy):
    def order(self, block):
        return (block.num_hits, -block.depth)


def test_eviction_follows_the_policy():
    pool = RankedPool(5, MostHitsLast())
    table = pool.take(4)
    for depth, block in enumerate(table):
        pool.register(block, 100 + depth, depth)
    pool.touch([table[1]])
    pool.release(reversed([*table, table[1]]))
    # Nobody hit 0, 2, 3: the deepest of them first; block 1 was hit once.
    assert pool.take(4) == [table[3], table[2], table[0], table[1]]


def test_an_uncached_block_goes_before_any_cached_one():
    pool = RankedPool(4, MostHitsLast())
    table = pool.take(3)
    pool.register(table[0], 1, 0)
    pool.release(table)
    assert pool.take(2) == [table[1], table[2]]


@given(st.lists(st.integers(1, 6), max_size=30), st.booleans(), st.randoms())
def test_runs_are_neighbours_and_nothing_is_lost(wishes, buddy, rng):
    free = FreeRuns(range(1, 17), buddy=buddy)
    held: list[list[int]] = []
    for wish in wishes:
        if free.fits(wish):
            run = free.take(wish)
            assert run == list(range(run[0], run[0] + len(run)))
            if buddy:
                assert len(run) & (len(run) - 1) == 0
                assert wish <= len(run) < 2 * wish
                assert (run[0] - 1) % len(run) == 0
            else:
                assert len(run) == wish
            held.append(run)
        else:
            assert buddy or free.longest < wish
            with pytest.raises(ValueError, match="no run"):
                free.take(wish)
        if held and rng.random() < 0.4:
            run = held.pop(rng.randrange(len(held)))
            rng.shuffle(run)
            free.put(run, [])
        blocks = [*free, *(block for run in held for block in run)]
        assert sorted(blocks) == list(range(1, 17))
        assert len(free) == 16 - sum(len(run) for run in held)


def test_fragments_do_not_make_a_run():
    free = FreeRuns(range(1, 9))
    parts = [free.take(2) for _ in range(4)]
    free.put(parts[0] + parts[2], [])
    assert len(free) == 4
    assert not free.fits(3)
    free.put(parts[1], [])
    assert free.take(6) == [1, 2, 3, 4, 5, 6]
