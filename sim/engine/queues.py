"""Waiting queues: first come first served, or by key."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any, Protocol

from sim.engine.sequence import Sequence
from sim.errors import UserError


def checked_key(key: Any, hook: str = "key()") -> Any:
    """A policy's sort key, unless it is a NaN or an array: UserError then."""
    try:
        if key != key:
            raise not_an_order("it is not equal to itself", hook)
    except (TypeError, ValueError) as error:
        raise not_an_order(str(error), hook) from None
    return key


def not_an_order(why: str, hook: str = "key()") -> UserError:
    """A policy's keys cannot be sorted."""
    return UserError(
        f"{hook} of the policy returned what cannot be compared ({why}); return numbers, or tuples "
        "of numbers and texts"
    )


class WaitingQueue(Protocol):
    """Sequences that wait for admission, in the order in which they are tried."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...

    def add(self, seq: Sequence) -> None:
        """A new arrival."""
        ...

    def put_back(self, seq: Sequence) -> None:
        """A preempted sequence."""
        ...

    def put_back_all(self, seqs: Iterable[Sequence]) -> None:
        """Sequences passed over in this step, in their order."""
        ...

    def peek(self) -> Sequence: ...

    def pop(self) -> Sequence: ...

    def remove(self, seq: Sequence) -> None: ...


class FcfsQueue:
    """By arrival; preempted and passed-over sequences return to the front."""

    def __init__(self) -> None:
        self._queue: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def add(self, seq: Sequence) -> None:
        self._queue.append(seq)

    def put_back(self, seq: Sequence) -> None:
        self._queue.appendleft(seq)

    def put_back_all(self, seqs: Iterable[Sequence]) -> None:
        self._queue.extendleft(reversed(list(seqs)))

    def peek(self) -> Sequence:
        return self._queue[0]

    def pop(self) -> Sequence:
        return self._queue.popleft()

    def remove(self, seq: Sequence) -> None:
        self._queue.remove(seq)


class KeyQueue:
    """Smallest key first, ties by arrival, then id. Keys are taken when a sequence is queued."""

    def __init__(self, key: Callable[[Sequence], Any]) -> None:
        self._key = key
        self._heap: list[tuple[Any, Any, str, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[-1] for entry in sorted(self._heap, key=lambda entry: entry[:-1]))

    def add(self, seq: Sequence) -> None:
        seq.order_key = key = checked_key(self._key(seq))
        try:
            heapq.heappush(self._heap, (key, seq.arrival, seq.id, seq))
        except TypeError as error:
            raise not_an_order(str(error)) from None

    put_back = add

    def put_back_all(self, seqs: Iterable[Sequence]) -> None:
        for seq in seqs:
            heapq.heappush(self._heap, (seq.order_key, seq.arrival, seq.id, seq))

    def peek(self) -> Sequence:
        return self._heap[0][-1]

    def pop(self) -> Sequence:
        return heapq.heappop(self._heap)[-1]

    def remove(self, seq: Sequence) -> None:
        self._heap = [entry for entry in self._heap if entry[-1] is not seq]
        heapq.heapify(self._heap)


class RekeyedQueue:
    """As `KeyQueue`, but with keys that move: they are taken anew whenever the queue is asked."""

    def __init__(self, key: Callable[[Sequence], Any]) -> None:
        self._key = key
        self._members: dict[Sequence, None] = {}
        self._first: Sequence | None = None  # what `peek` answered, for a `pop` right after

    def _rank(self, seq: Sequence) -> tuple[Any, Any, str]:
        return checked_key(self._key(seq)), seq.arrival, seq.id

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted(self._members, key=self._rank))

    def add(self, seq: Sequence) -> None:
        self._members[seq] = None
        self._first = None

    put_back = add

    def put_back_all(self, seqs: Iterable[Sequence]) -> None:
        for seq in seqs:
            self.add(seq)

    def peek(self) -> Sequence:
        ranked = [(self._rank(seq), seq) for seq in self._members]
        try:
            self._first = min(ranked, key=itemgetter(0))[1]
        except TypeError as error:
            raise not_an_order(str(error)) from None
        return self._first

    def pop(self) -> Sequence:
        first = self._first or self.peek()
        self.remove(first)
        return first

    def remove(self, seq: Sequence) -> None:
        del self._members[seq]
        self._first = None
