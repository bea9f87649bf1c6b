"""Reading the small files that a user names: scenarios, model configs, profiles."""

from __future__ import annotations

import stat
from pathlib import Path

from sim.errors import UserError


def read_bytes(path: str | Path, complaint: str = "cannot be read") -> bytes:
    """The content of a regular file. UserError for anything else, in one line and at once: a
    pipe that nobody writes to, or an endless device, would never end."""
    file, text = Path(path), str(path)
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    try:
        mode = file.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UserError(f"{shown}: {complaint}: it is a directory, not a file")
        if not stat.S_ISREG(mode):
            raise UserError(f"{shown}: {complaint}: it is not a regular file")
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{shown}: {complaint}: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in the name
        raise UserError(f"{shown!r}: {complaint}: {error}") from None


def read_text(path: str | Path, complaint: str = "cannot be read") -> str:
    """The UTF-8 text of a regular file, else UserError."""
    try:
        return read_bytes(path, complaint).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: {complaint}: not UTF-8 text at byte {error.start + 1}") from None
