"""The prefix cache of extents, in small stories; fuzzing it is the engines' business."""

from __future__ import annotations

from sim.engine.fast.prefix import PrefixBlocks
from sim.engine.fast.sequence import DECODE, FastSequence
from sim.engine.interface import RequestRecord, Status
from sim.request import Request, Segment, prompt_key

BLOCK = 4


class Books:
    """A cache, and sequences that hold all their prompt's blocks or none."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = PrefixBlocks(num_blocks, BLOCK, lambda seq: seq.known)
        self.held: list[FastSequence] = []

    def admit(self, uid: int, *segments: tuple[int, int, int]) -> FastSequence:
        pieces = tuple(Segment(*segment) for segment in segments)
        request = Request(uid, str(uid), 0, sum(s.length for s in pieces), 1, pieces)
        seq = FastSequence(request, RequestRecord(request, Status.UNFINISHED), 1, False)
        seq.admission = uid
        hit = self.cache.find_hit(seq, seq.known)
        self.cache.acquire(seq, hit)
        blocks = -(-seq.known // BLOCK)
        self.cache.take(blocks - seq.registered)
        seq.held, seq.stage = blocks, DECODE
        self.cache.register(seq, seq.known)
        self.held.append(seq)
        self.cache.check_integrity(self.held)
        return seq

    def drop(self, seq: FastSequence) -> None:
        self.held.remove(seq)
        self.cache.release(seq)
        self.cache.leave(seq)
        self.cache.check_integrity(self.held)

    def hit(self, uid: int, *segments: tuple[int, int, int]) -> int:
        """Blocks a request would find."""
        pieces = tuple(Segment(*segment) for segment in segments)
        request = Request(uid, str(uid), 0, sum(s.length for s in pieces), 1, pieces)
        seq = FastSequence(request, RequestRecord(request, Status.UNFINISHED), 1, False)
        found = sum(count for _, count in self.cache.find_hit(seq, seq.known))
        self.cache.leave(seq)
        return found


def private(uid: int, length: int) -> tuple[int, int, int]:
    return (prompt_key(uid), 0, length)


def test_a_shared_prefix_is_found_while_held_and_after():
    books = Books(20)
    first = books.admit(1, (0, 0, 12), private(1, 5))
    second = books.admit(2, (0, 0, 10), private(2, 6))
    assert [seq.lengths[0] for seq in (first, second)] == [4, 2]
    assert books.cache.free == 20 - 5 - 2
    books.drop(first)
    assert books.hit(3, (0, 0, 12), private(3, 5)) == 3
    books.drop(second)
    assert books.cache.free == 20
    assert books.hit(3, (0, 0, 12), private(3, 5)) == 3


def test_at_least_one_token_is_computed():
    books = Books(20)
    books.drop(books.admit(1, (0, 0, 16)))
    assert books.hit(2, (0, 0, 16)) == 3
    assert books.hit(2, (0, 0, 17)) == 4


def test_the_end_of_the_text_freed_first_goes_first():
    books = Books(10)
    older, newer = books.admit(1, (1, 0, 16)), books.admit(2, (2, 0, 16))
    books.drop(older)
    books.drop(newer)
    third = books.admit(3, (3, 0, 20))  # 2 blank blocks, then 3 of the older text, from its end
    assert books.hit(4, (1, 0, 16), private(4, 1)) == 1
    assert books.hit(4, (2, 0, 16), private(4, 1)) == 4
    books.drop(third)


def test_a_hit_takes_blocks_out_of_the_middle_of_the_queue():
    books = Books(9)
    for uid in (1, 2):
        books.drop(books.admit(uid, (uid, 0, 16)))
    held = books.admit(3, (1, 0, 8), private(3, 1))  # 2 blocks of text 1, and the blank one
    assert (held.lengths, books.cache.blank) == ([2], 0)
    other = books.admit(4, (9, 0, 12))  # takes the rest of text 1 and the end of text 2
    assert books.hit(5, (1, 0, 16), private(5, 1)) == 2
    assert books.hit(5, (2, 0, 16), private(5, 1)) == 3
    books.drop(other)
    books.drop(held)


def test_the_copy_registered_first_is_found_and_then_the_next():
    books = Books(12)
    books.drop(books.admit(1, (0, 0, 12)))
    whole = books.admit(2, (0, 0, 12))  # finds 2 blocks, computes a twin of the third
    (line, _) = whole.path[0]
    assert [(e.start, e.end) for e in line.twins] == [(2, 3)]
    filler = books.admit(3, (9, 0, 36))  # evicts the first copy of the third
    assert line.twins == []
    assert books.hit(4, (0, 0, 12), private(4, 1)) == 3
    books.drop(filler)
    books.drop(whole)


def test_lines_go_with_their_last_block():
    books = Books(4)
    books.drop(books.admit(1, private(1, 16)))
    assert len(list(books.cache.lines.walk())) == 2
    held = books.admit(2, private(2, 16))
    assert len(list(books.cache.lines.walk())) == 2
    books.drop(held)
