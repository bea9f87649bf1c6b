"""One cell of a trace file to an integer, exactly, or the reason why not.

Cells come as text (CSV, JSON numbers), int or float (Parquet), or None. Times are integer
nanoseconds on the file's own clock: since 1970 for dates, since wherever it counts from otherwise.
"""

from __future__ import annotations

import datetime
import decimal
import math
import re

MAX_TOKENS = 2**31 - 1
"""More tokens than this in one request is taken for a broken row; sums stay far from int64."""
MIN_NS, MAX_NS = -(2**63), 2**63 - 1

TIME_DIGITS = {"s": 9, "ms": 6, "us": 3, "ns": 0}
"""Decimal digits between a time unit and the nanosecond."""
UNIT_NS: dict[str, int] = {unit: 10**digits for unit, digits in TIME_DIGITS.items()}

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
_DATE = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})"
    r"(?:[ T]([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:\.([0-9]{1,18}))?)?)?"
    r"(?: ?(?:Z|UTC|([+-])([0-9]{2}):?([0-9]{2})))?"
)
_EXACT = decimal.Context(prec=2000, Emax=9999, Emin=-9999, rounding=decimal.ROUND_HALF_EVEN)
_EPOCH_DAY = datetime.date(1970, 1, 1).toordinal()


class BadRow(Exception):
    """A row that cannot be used: its `kind` is counted, its `reason` told to the user."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


def shown(value: object, width: int = 60) -> str:
    """`value` for a one-line message: escaped and cut."""
    text = ascii(value)
    return text if len(text) <= width else text[: width - 4] + "..." + text[0]


def number(value: object, what: str) -> decimal.Decimal:
    """`value` as an exact decimal; BadRow when it is missing, no number, NaN or infinite."""
    if isinstance(value, str):
        text = value.strip()
        if not text:
            raise BadRow("malformed", f"{what} is empty")
        if len(text) > 400 or not _NUMBER.fullmatch(text):
            raise BadRow("malformed", f"{what} is {shown(value)}, not a number")
        return decimal.Decimal(text)
    if value is None:
        raise BadRow("malformed", f"{what} is empty")
    if isinstance(value, bool) or not isinstance(value, int | float | decimal.Decimal):
        raise BadRow("malformed", f"{what} is {shown(value)}, not a number")
    if not math.isfinite(value):
        raise BadRow("malformed", f"{what} is {value}, not a number")
    # repr of a float is the shortest decimal that reads back the same: what was meant
    return decimal.Decimal(repr(value) if isinstance(value, float) else value)


def whole(value: object, what: str, low: int, high: int) -> int:
    """`value` as an integer in [low, high]; `374.0` counts as 374."""
    if type(value) is int:
        result = value
    elif isinstance(value, str) and value.isdigit() and value.isascii() and len(value) <= 18:
        result = int(value)
    else:
        exact = number(value, what)
        if exact.adjusted() > 30:
            raise BadRow("range", f"{what} is {shown(value)}, out of range")
        if exact != exact.to_integral_value(context=_EXACT):
            raise BadRow("malformed", f"{what} is {shown(value)}, not a whole number")
        result = int(exact)
    if result > high:
        raise BadRow("range", f"{what} is {shown(value)}, more than {high}")
    if result < low:
        if low == 1 and result == 0:
            raise BadRow("zero", f"{what} is 0; a request has at least one token")
        raise BadRow("negative", f"{what} is {shown(value)}, less than {low}")
    return result


def tokens(value: object, what: str) -> int:
    """A prompt or output length, at least one token."""
    return whole(value, what, 1, MAX_TOKENS)


def priority(value: object, what: str) -> int:
    """A priority; smaller is served first, may be negative."""
    return whole(value, what, -MAX_TOKENS, MAX_TOKENS)


def label(value: object, what: str) -> str:
    """A name (tenant, session, id) as text; missing is the empty name."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else str(value)
    if len(text) > 1000:
        raise BadRow("malformed", f"{what} is {shown(text)}, longer than 1000 characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRow("malformed", f"{what} is {shown(text)}, not valid UTF-8") from None
    return text


def arrival(value: object, what: str, unit: str) -> int:
    """An arrival as nanoseconds; `unit` is s, ms, us, ns or date (ISO 8601, UTC unless it says)."""
    if unit == "date":
        return date_ns(value, what)
    if type(value) is int and 0 <= value <= MAX_NS // UNIT_NS[unit]:
        return value * UNIT_NS[unit]
    exact = number(value, what)
    if exact < 0:
        raise BadRow("negative", f"{what} is {shown(value)}, before the clock's start")
    if exact.adjusted() > 30 or exact.scaleb(TIME_DIGITS[unit], context=_EXACT) > MAX_NS:
        hint = f"; is it in {_finer(unit)}?" if unit in ("s", "ms") else ""
        raise BadRow("range", f"{what} is {shown(value)} {unit}, beyond the 64-bit clock{hint}")
    scaled = exact.scaleb(TIME_DIGITS[unit], context=_EXACT)
    return int(scaled.to_integral_value(rounding=decimal.ROUND_HALF_EVEN, context=_EXACT))


def _finer(unit: str) -> str:
    return "milliseconds (arrival_ms=...)" if unit == "s" else "nanoseconds (arrival_ns=...)"


def date_ns(value: object, what: str) -> int:
    """An ISO 8601 date and time, up to the nanosecond, as nanoseconds since 1970 UTC."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise BadRow("malformed", f"{what} is empty")
    match = _DATE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise BadRow("malformed", f"{what} is {shown(value)}, not a date and time (ISO 8601)")
    year, month, day, hour, minute, second, fraction, sign, zone_h, zone_m = match.groups()
    try:
        days = datetime.date(int(year), int(month), int(day)).toordinal() - _EPOCH_DAY
        time = datetime.time(int(hour or 0), int(minute or 0), int(second or 0))
    except ValueError as error:
        raise BadRow("malformed", f"{what} is {shown(value)}: {error}") from None
    seconds = days * 86_400 + time.hour * 3600 + time.minute * 60 + time.second
    if sign is not None:
        offset = int(zone_h) * 3600 + int(zone_m) * 60
        seconds += offset if sign == "-" else -offset
    result = seconds * 10**9
    if fraction:
        # more than nine digits are rounded half up: no writer has a finer clock
        result += (int(fraction.ljust(18, "0")) + 5 * 10**8) // 10**9
    if not MIN_NS <= result <= MAX_NS:
        raise BadRow("range", f"{what} is {shown(value)}, outside the years 1678 to 2261")
    return result


def looks_like_date(value: object) -> bool | None:
    """True for a date, False for a number, None for neither."""
    text = value.strip() if isinstance(value, str) else value
    if isinstance(text, str):
        if _DATE.fullmatch(text):
            return True
        return False if _NUMBER.fullmatch(text) else None
    return False if isinstance(text, int | float) and not isinstance(text, bool) else None
