"""Waiting queues: first come first served, or by key."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from sim.engine.sequence import Sequence


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
        self._heap: list[tuple[Any, float, str, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[-1] for entry in sorted(self._heap, key=lambda entry: entry[:-1]))

    def add(self, seq: Sequence) -> None:
        seq.order_key = self._key(seq)
        heapq.heappush(self._heap, (seq.order_key, seq.arrival, seq.id, seq))

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
