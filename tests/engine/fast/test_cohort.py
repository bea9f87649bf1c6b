"""The cohort's sums, against lists."""

from __future__ import annotations

import random

from sim.engine.fast.blocks import Blocks
from sim.engine.fast.cohort import Cohort
from sim.engine.fast.sequence import DECODE, GONE, FastSequence
from sim.engine.interface import RequestRecord, Status
from sim.request import Request


def member(admission: int, offset: int, last_row: int) -> FastSequence:
    request = Request(admission, str(admission), 0, 1, 1)
    seq = FastSequence(request, RequestRecord(request, Status.UNFINISHED), 1, False)
    seq.admission, seq.offset, seq.last_row = admission, offset, last_row
    return seq


def test_sums_follow_members_through_joins_leaves_and_rows():
    rng = random.Random(1)
    cohort = Cohort(block_size=7)
    members: list[FastSequence] = []
    for number in range(400):
        action = rng.random()
        if action < 0.4:
            members.append(member(number, rng.randint(-5, 60), 10**6))
            cohort.add(members[-1])
        elif action < 0.6 and members:
            cohort.remove(members.pop(rng.randrange(len(members))))
        else:
            cohort.advance(rng.choice([1, 1, 3, 20]))
        cohort.check_integrity(members)


def test_usage_is_the_demand_of_the_rows_to_come_while_blocks_last():
    rng = random.Random(2)
    for size in (1, 2, 5, 16):
        cohort = Cohort(size)
        cohort.advance(rng.randint(0, 50))
        members = [member(i, rng.randint(0, 40), 10**6) for i in range(6)]
        for seq in members:
            cohort.add(seq)
        blocks = Blocks(100, size)
        blocks.take(70)
        expected, used = [], 70
        for row in range(cohort.row, cohort.row + 40):
            used += sum((seq.offset + row - 1) % size == 0 for seq in members)
            assert cohort.demand(row) == used - ([70, *expected][-1])
            expected.append(used)
        fitting = [n for n in expected if n <= 100]
        assert cohort.usage(40, blocks) == fitting
        assert cohort.usage(3, blocks) == fitting[:3]
        assert cohort.usage(0, blocks) == []


def test_last_tokens_come_by_row_then_admission_and_leavers_are_forgotten():
    cohort = Cohort(4)
    seqs = [member(i, 0, row) for i, row in enumerate([9, 5, 5, 7, 5, 9])]
    for seq in reversed(seqs):
        cohort.add(seq)
        cohort.expect(seq)
    assert cohort.first_last_row() == 5
    seqs[2].stage = GONE
    assert [s.admission for s in cohort.pop_last_tokens(7)] == [1, 4, 3]
    assert cohort.first_last_row() == 9
    assert all(seq.stage is DECODE for seq in seqs if seq is not seqs[2])
