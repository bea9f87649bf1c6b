"""The errors a user can cause. The command line prints them as one line and exits with 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake of the user: the message names what, where and what to do, in one line."""


class RunEnded(UserError):
    """A run that cannot go on, such as a device out of memory: what was served until then stands,
    and the message says what happened."""


def normalise(name: str) -> str:
    """The form in which names are compared: lower case, letters and digits only."""
    return "".join(c for c in name.lower() if c.isalnum())


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """An error for a name that is not known, with the nearest match and the choices."""
    names = sorted(known)
    by_norm = {normalise(n): n for n in names}
    near = difflib.get_close_matches(normalise(name), list(by_norm), n=1, cutoff=0.5)
    hint = f"; did you mean {by_norm[near[0]]!r}?" if near else ""
    shown = ", ".join(names[:40]) + (", ..." if len(names) > 40 else "")
    if len(name) > 200:
        name = f"{name[:200]}..."
    return UserError(f"unknown {kind} {name!r}{hint} (known: {shown or 'none'})")
