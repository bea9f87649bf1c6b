"""The tree of texts a prefix cache knows: which sequences share how many leading blocks.

A block's identity is its tokens and everything before it (vLLM chains hashes). Instead of naming
blocks one by one, a *line* stands for the text of one sequence from the block on where it left
all texts known before, and on without end. A sequence's blocks are a *path* through the tree: so
many blocks along the first line, then along a child of it, and so on, last along a line of its
own. The cost is per piece of text, not per block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from sim.request import Request, Segment, output_key, prompt_key

if TYPE_CHECKING:
    from sim.engine.fast.extents import Extent
    from sim.engine.fast.sequence import FastSequence

END = 1 << 60
"""Larger than any block or token number: an output has no end known beforehand."""

Run: TypeAlias = tuple[int, int | tuple[int, ...], int]
"""Blocks from a block number on that continue one text: (block, content, token position there).
A block with several texts in it is a run of its own: (block, its flat pieces, -1)."""

Path: TypeAlias = list[tuple["Line", int]]
"""(line, block where it is left), first to last; the last is left at END."""


class Line:
    """A text from block `start` on.

    `main` and `twins` are the cached blocks on it, kept by the prefix cache: `main` holds, for
    every position that is cached, the copy registered first among those alive, in order of
    position; `twins` the other copies in order of registration.
    """

    __slots__ = (
        "children",
        "key",
        "main",
        "parent",
        "runs",
        "source",
        "start",
        "twins",
        "users",
        "writers",
    )

    def __init__(self, parent: Line | None, key: Run, source: Request | None) -> None:
        self.parent = parent
        self.key = key
        self.start = key[0]
        self.source = source
        self.runs: list[Run] | None = None
        """The text from `start` on; made from `source` when first needed."""
        self.children: dict[Run, Line] | None = None
        """Texts that leave this one: first run of theirs -> line."""
        self.users = 0
        """Sequences with this line on their path."""
        self.writers: tuple[FastSequence, ...] = ()
        """Sequences whose generated tokens come to lie on this line."""
        self.main: list[Extent] = []
        self.twins: list[Extent] = []

    @property
    def is_empty(self) -> bool:
        """Nothing depends on it."""
        return not (self.main or self.users or self.children or self.twins)


class Lines:
    """The tree. Lines nobody uses and that hold no cached blocks are dropped."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._common_root = Line(None, (0, -1, 0), None)
        self._common_root.children = {}
        self._roots: dict[tuple[str | None, str | None], Line] = {}

    def enter(self, seq: FastSequence) -> Path:
        """The path of a sequence; it counts as user of the lines on it until `leave`."""
        request, size = seq.request, self._block_size
        root = self._common_root
        if request.lora or request.cache_salt:
            root = self._isolated_root(request)
        if request.segments is None and request.prompt_tokens >= size:
            key: Run = (0, prompt_key(request.uid), 0)
            children = root.children
            assert children is not None
            if key not in children:
                line = children[key] = Line(root, key, request)
                line.users = 1
                line.writers = (seq,)
                return [(line, END)]
        path = self._walk(root, request)
        prompt_blocks = request.prompt_tokens // size
        for line, end in path:
            line.users += 1
            if end > prompt_blocks:
                line.writers = (*line.writers, seq)
        return path

    def _isolated_root(self, request: Request) -> Line:
        """Where the texts of one adapter and cache salt start. (vLLM hashes the adapter into every
        block and the salt into the first; as hashes are chained, both in front is the same.)"""
        isolation = (request.lora or None, request.cache_salt or None)
        root = self._roots.get(isolation)
        if root is None:
            root = self._roots[isolation] = Line(None, (0, -1, 0), None)
            root.children = {}
        return root

    def _walk(self, root: Line, request: Request) -> Path:
        """Follow known texts as far as they agree with this one, then start a new line."""
        size = self._block_size
        runs = text_runs(request, size)
        path: Path = []
        line, head, i = root, runs[0], 0
        while True:
            if line.children is None:
                line.children = {}
            child = line.children.get(head)
            if child is None:
                child = line.children[head] = Line(line, head, request)
                child.runs = [head, *runs[i + 1 :]]
                path.append((child, END))
                return path
            theirs = child.runs
            if theirs is None:
                assert child.source is not None
                theirs = child.runs = text_runs(child.source, size)
            k = 1
            for mine, other in zip(runs[i + 1 :], theirs[1:], strict=False):
                if mine != other:
                    break
                k += 1
            left = [text[at][0] for text, at in ((runs, i + k), (theirs, k)) if at < len(text)]
            if not left:
                path.append((child, END))
                return path
            block = min(left)
            path.append((child, block))
            i += k
            if i == len(runs) or runs[i][0] > block:  # the texts part inside a run of this one
                i -= 1
            first, content, start = runs[i]
            if start >= 0:
                start += (block - first) * size
            line, head = child, (block, content, start)

    def leave(self, seq: FastSequence) -> None:
        """A sequence is gone."""
        assert seq.path is not None
        for line, _ in reversed(seq.path):
            line.users -= 1
            if line.writers:
                line.writers = tuple([other for other in line.writers if other is not seq])
            if not line.users and not line.main:
                self.prune(line)
        seq.path = None

    def prune(self, line: Line) -> None:
        """Drop a line, and then its ancestors, as far as nothing depends on them."""
        while line.is_empty and line.parent is not None:
            parent = line.parent
            assert parent.children is not None
            del parent.children[line.key]
            line.parent = None
            line = parent

    def walk(self) -> Iterable[Line]:
        """All lines (for audits)."""
        todo = [self._common_root, *self._roots.values()]
        while todo:
            line = todo.pop()
            yield line
            todo.extend((line.children or {}).values())


def text_runs(request: Request, block_size: int) -> list[Run]:
    """The text of a request, its outputs included, as runs of blocks. Equal texts give equal
    runs, however their segments are cut."""
    runs: list[Run] = []
    block = filled = 0
    pieces: list[int] = []  # of the block that is being filled
    for segment in _merged((*request.prompt_segments(), Segment(output_key(request.uid), 0, END))):
        content, start, length = segment
        if filled:
            taken = min(block_size - filled, length)
            pieces += (content, start, taken)
            filled, start, length = filled + taken, start + taken, length - taken
            if filled < block_size:
                continue
            runs.append((block, tuple(pieces), -1))
            block, filled, pieces = block + 1, 0, []
        if length >= block_size:
            runs.append((block, content, start))
            count = length // block_size
            block, start, length = block + count, start + count * block_size, length % block_size
        if length:
            filled, pieces = length, [content, start, length]
    return runs


def _merged(segments: Iterable[Segment]) -> list[Segment]:
    merged: list[Segment] = []
    for segment in segments:
        if merged:
            last = merged[-1]
            if segment.content == last.content and segment.start == last.start + last.length:
                merged[-1] = Segment(last.content, last.start, last.length + segment.length)
                continue
        if segment.length:
            merged.append(segment)
    return merged
