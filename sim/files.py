"""Reading the small text files that a user names: scenarios, model configs, profiles."""

from __future__ import annotations

import stat
from pathlib import Path

from sim.errors import UserError


def read_text(path: str | Path) -> str:
    """The UTF-8 text of a regular file. UserError for anything else, in one line and at once: a
    pipe that nobody writes to, or an endless device, would never end."""
    file = Path(path)
    try:
        mode = file.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UserError(f"{_short(path)}: is a directory, not a file")
        if not stat.S_ISREG(mode):
            raise UserError(f"{_short(path)}: is not a regular file")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{_short(path)}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{_short(path)}: is not UTF-8 text (byte {error.start + 1})") from None
    except ValueError as error:  # a NUL in the name
        raise UserError(f"{_short(path)!r}: cannot be read: {error}") from None


def _short(path: str | Path) -> str:
    text = str(path)
    return text if len(text) <= 200 else f"{text[:200]}..."
