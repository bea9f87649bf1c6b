"""A trace file as blocks of whole lines: plain or gzip, told by its content, never by its name."""

from __future__ import annotations

import stat
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from sim.errors import UserError

from .values import shown

READ_BYTES = 1 << 22
PACKED_BYTES = 1 << 16
"""Compressed bytes at a time: what comes before damage is not lost."""
LINE_BYTES = 1 << 26
"""A line (or quoted row) longer than this is taken for junk."""
BOM = b"\xef\xbb\xbf"
BLANK = BOM + b" \t\r\n"
"""Bytes that may stand before a JSON document."""
GZIP = b"\x1f\x8b"
PARQUET = b"PAR1"
_PACKED = {
    b"PK\x03\x04": "a zip archive",
    b"\x28\xb5\x2f\xfd": "zstd-compressed",
    b"BZh": "bzip2-compressed",
    b"\xfd7zXZ": "xz-compressed",
}


@dataclass
class BadRows:
    """What happens to rows that cannot be used: the first is an error, or all are counted."""

    path: str
    skip: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    first: str = ""
    """Place and reason of the first row skipped."""

    def report(self, where: str, kind: str, reason: str) -> None:
        """Count a bad row; raises UserError unless bad rows are skipped."""
        if not self.skip:
            raise UserError(f"{self.path}: {where}: {reason} (--skip-bad-rows skips such rows)")
        self.first = self.first or f"{where}: {reason}"
        self.counts[kind] += 1

    @property
    def total(self) -> int:
        return sum(self.counts.values())


class _Damaged(Exception):
    """The compressed data ends early or is corrupt."""


class Source:
    """A readable regular file. `head` is its first (decompressed) block, empty for an empty file.

    Raises UserError when the file is missing, a directory, unreadable, binary or packed in a way
    that is not read. Reading it again (`blocks`) starts from the beginning.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        name = str(path)
        plain = name.isprintable() and name.strip() and len(name) <= 500
        self.shown = name if plain else shown(name, 200)
        try:
            mode = self.path.stat().st_mode
            if stat.S_ISDIR(mode):
                raise UserError(f"{self.shown}: is a directory, not a trace file")
            if not stat.S_ISREG(mode):
                raise UserError(f"{self.shown}: is not a regular file")
            with self.path.open("rb") as file:
                self.gzip = file.read(2) == GZIP
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from None
        try:
            self.head = next(self._chunks(), b"")
        except _Damaged as error:
            raise UserError(f"{self.shown}: {error}") from None
        if not self.head:
            raise UserError(f"{self.shown}: is empty, no requests in it")
        self.parquet = self.head.startswith(PARQUET)
        self.json = not self.parquet and self.head.lstrip(BLANK).startswith(b"{")
        if not self.parquet:
            self._check_text()

    def _check_text(self) -> None:
        for magic, kind in _PACKED.items():
            if self.head.startswith(magic):
                raise UserError(f"{self.shown}: is {kind}; unpack it first (gzip is read as it is)")
        if self.head.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise UserError(f"{self.shown}: is UTF-16 text; save it as UTF-8")
        if self.head.lstrip(BLANK).startswith(b"["):
            raise UserError(
                f"{self.shown}: is a JSON array; one object a line is read (jq -c '.[]' makes them)"
            )
        if b"\0" in self.head[:65536]:
            raise UserError(f"{self.shown}: is binary, neither text (CSV, JSON lines) nor Parquet")
        if not self.head.removeprefix(BOM).strip():
            raise UserError(f"{self.shown}: is blank, no requests in it")

    def _unreadable(self, error: Exception) -> UserError:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return UserError(f"{self.shown}: cannot be read: {reason}")

    def _chunks(self) -> Iterator[bytes]:
        """The decompressed content in pieces; raises UserError or _Damaged."""
        try:
            with self.path.open("rb") as file:
                if self.gzip:
                    yield from _gathered(_gunzip(file))
                else:
                    while piece := file.read(READ_BYTES):
                        yield piece
        except OSError as error:
            raise self._unreadable(error) from None

    def content(self) -> bytes:
        """All of it, decompressed."""
        try:
            return b"".join(self._chunks())
        except _Damaged as error:
            raise UserError(f"{self.shown}: {error}") from None

    def blocks(self, bad: BadRows, quotes: bool) -> Iterator[tuple[int, bytes]]:
        """(number of the first line from 1, block of whole lines ending in a newline).

        With `quotes`, a newline inside double quotes does not end a block. What follows damage in
        the compressed data is reported to `bad` and, when that skips, left out.
        """
        line = 1
        rest: list[bytes] = []
        held = odd = 0
        chunks = self._chunks()
        while True:
            try:
                piece = next(chunks, b"")
            except _Damaged as error:
                head, _, tail = b"".join(rest).rpartition(b"\n")
                if head:
                    yield line, head + b"\n"
                    line += _num_lines(head) + 1
                bad.report(f"line {line}", "truncated", str(error))
                return
            if line == 1 and not rest:
                piece = piece.removeprefix(BOM)
            if not piece:
                break
            cut = piece.rfind(b"\n") + 1
            if quotes:
                cut, odd = _cut_outside_quotes(piece, odd)
            rest.append(piece[:cut] if cut else piece)
            held += len(rest[-1])
            if cut:
                block = b"".join(rest)
                yield line, block
                line += _num_lines(block)
                rest = [piece[cut:]]
                held = len(rest[0])
            elif held > LINE_BYTES:
                block, newline, tail = b"".join(rest).rpartition(b"\n")
                if not newline:
                    reason = f"no end within {LINE_BYTES >> 20} MB; is this a text file?"
                    raise UserError(f"{self.shown}: line {line}: {reason}")
                # a quote that is never closed: the reader of rows will find and name its line
                yield line, block + newline
                line += _num_lines(block) + 1
                rest, held, odd = [tail], len(tail), 0
        block = b"".join(rest)
        if block:
            yield line, block if block.endswith(b"\n") else block + b"\n"


def _num_lines(block: bytes) -> int:
    return int(np.count_nonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n")))


def _cut_outside_quotes(piece: bytes, odd: int) -> tuple[int, int]:
    """Where the last newline outside quotes ends (0: none), and the quote parity after it.

    `odd` is 1 when `piece` starts inside quotes. The parity returned is the state at the end of
    `piece`; since a cut is outside quotes, it is also that of what follows the cut.
    """
    total = piece.count(b'"')
    end = len(piece)
    after = 0
    while True:
        at = piece.rfind(b"\n", 0, end)
        if at < 0:
            return 0, (odd + total) % 2
        after += piece.count(b'"', at, end)
        if (odd + total - after) % 2 == 0:
            return at + 1, (odd + total) % 2
        end = at


def _gathered(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """`pieces` joined to READ_BYTES or more each, all of them even when damage follows."""
    held: list[bytes] = []
    size = 0
    try:
        for piece in pieces:
            held.append(piece)
            size += len(piece)
            if size >= READ_BYTES:
                yield b"".join(held)
                held, size = [], 0
    except _Damaged:
        if held:
            yield b"".join(held)
        raise
    if held:
        yield b"".join(held)


def _gunzip(file: BinaryIO) -> Iterator[bytes]:
    """The content of a (multi-member) gzip file in bounded pieces; raises _Damaged."""
    stream = zlib.decompressobj(31)
    raw = b""
    ended = False
    while True:
        if not raw:
            raw = file.read(PACKED_BYTES)
            if not raw and ended:
                return
            if not raw and (piece := stream.decompress(b"", READ_BYTES)):
                yield piece  # output that was still waiting behind the size limit
                ended = stream.eof
                continue
            if not raw and not stream.eof:
                raise _Damaged("the gzip data ends early (a truncated file?)")
            if not raw:
                return
        if ended:
            # zero padding may follow a member, then the next member
            raw = raw.lstrip(b"\0")
            if not raw:
                continue
            stream, ended = zlib.decompressobj(31), False
        try:
            piece = stream.decompress(raw, READ_BYTES)
        except zlib.error as error:
            raise _Damaged(f"the gzip data is damaged ({error})") from None
        ended = stream.eof
        raw = stream.unused_data if ended else stream.unconsumed_tail
        if piece:
            yield piece
