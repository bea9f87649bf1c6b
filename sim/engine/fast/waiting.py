"""Waiting queues of the fast engine. A sequence that left while waiting is skipped when found."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any, Protocol

from sim.engine.fast.sequence import GONE, FastSequence
from sim.engine.queues import checked_key, not_an_order


class Waiting(Protocol):
    """Sequences in the order in which they are tried. `peek` only while some wait."""

    def add(self, seq: FastSequence) -> bool:
        """A new arrival. Whether it is behind all others."""
        ...

    def put_back(self, seq: FastSequence) -> None:
        """A preempted sequence."""
        ...

    def peek(self) -> FastSequence: ...

    def pop(self) -> FastSequence:
        """Take out what `peek` has just answered."""
        ...

    def __iter__(self) -> Iterator[FastSequence]: ...


class ArrivalQueue:
    """First come, first served; preempted sequences return to the front."""

    def __init__(self) -> None:
        self._queue: deque[FastSequence] = deque()

    def add(self, seq: FastSequence) -> bool:
        self._queue.append(seq)
        return True

    def put_back(self, seq: FastSequence) -> None:
        self._queue.appendleft(seq)

    def peek(self) -> FastSequence:
        queue = self._queue
        while queue[0].stage is GONE:
            queue.popleft()
        return queue[0]

    def pop(self) -> FastSequence:
        return self._queue.popleft()

    def __iter__(self) -> Iterator[FastSequence]:
        return (seq for seq in self._queue if seq.stage is not GONE)


class KeyedQueue:
    """Smallest key first, ties by arrival. Keys are taken when a sequence is queued."""

    def __init__(self, key: Callable[[FastSequence], Any]) -> None:
        self._key = key
        self._heap: list[tuple[Any, int, int, FastSequence]] = []

    def add(self, seq: FastSequence) -> bool:
        seq.order_key = key = checked_key(self._key(seq))
        request = seq.request
        try:
            heappush(self._heap, (key, request.arrival_ns, request.uid, seq))
        except TypeError as error:
            raise not_an_order(str(error)) from None
        return self._heap[0][-1] is not seq

    def put_back(self, seq: FastSequence) -> None:
        self.add(seq)

    def peek(self) -> FastSequence:
        heap = self._heap
        while heap[0][-1].stage is GONE:
            heappop(heap)
        return heap[0][-1]

    def pop(self) -> FastSequence:
        return heappop(self._heap)[-1]

    def __iter__(self) -> Iterator[FastSequence]:
        entries = sorted(self._heap, key=lambda entry: entry[:-1])
        return (entry[-1] for entry in entries if entry[-1].stage is not GONE)
