"""Units: SI base units inside, conversion once at each boundary; printed numbers are read here, with bounds."""

from __future__ import annotations

import math

GIB = 1024.0**3
GB = 1e9
TERA = 1e12
MILLI = 1e-3
MICRO = 1e-6


def seconds(value_us: float) -> float:
    """Microseconds to seconds."""
    return value_us * MICRO


def bytes_per_s(value_gb_per_s: float) -> float:
    """GB/s (10^9 bytes per second) to bytes/s."""
    return value_gb_per_s * GB


def flops_per_s(value_tflops: float) -> float:
    """TFLOP/s to FLOP/s."""
    return value_tflops * TERA


def read_number(value: object, *, least: float = 0.0, most: float = 1e18) -> float:
    """A number of a log, script or table, as text or as JSON has it; ValueError, with its begin, for one out of range.

    Python's own readers take digits of every script, make infinity of 1e400, and refuse 5,000 digits by other errors.
    """
    try:
        text = str(value).strip() if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
        found = float(text) if text.isascii() else math.nan
    except ValueError:
        found = math.nan
    if not least <= found <= most:
        raise ValueError(f"{_begin(value)} is not a number from {least:g} to {most:g}")
    return found


def read_count(value: object, *, least: int = 0, most: int = 2**53) -> int:
    """The same of a whole number."""
    try:
        found = read_number(value, least=least, most=most)
    except ValueError:
        found = math.nan
    if not found.is_integer():
        raise ValueError(f"{_begin(value)} is not a whole number from {least:,} to {most:,}")
    return int(found)


def json_int(digits: str) -> int:
    """A whole number of a JSON text, of which Python's own reader would refuse 5,000 digits by another error."""
    if len(digits) > 4000:
        raise ValueError(f"{_begin(digits)} is no number that can be read")
    return int(digits)


def _begin(value: object) -> str:
    """A value as text, of a long one its begin."""
    text = ascii(value) if isinstance(value, str | float | bool) else str(value)
    return text if len(text) <= 40 else f"{text[:24]}… ({len(text):,} characters)"


def counted(count: int, noun: str) -> str:
    """A count as text: `1 grid`, `1,024 grids`, `2 batches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def show_bytes(value_bytes: float) -> str:
    """Bytes as text, in binary units: `37.2 GiB`."""
    size = float(value_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return (
                f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
            )
        size /= 1024
    raise AssertionError("unreachable")


def show_count(value: float) -> str:
    """A large number as text, to three digits: `512`, `48.3k`, `1.17M`, `1.5T`."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def show_seconds(value_s: float) -> str:
    """Seconds as text: `12.3 ms`, `4.56 s`."""
    for limit, scale, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if abs(value_s) < limit:
            return f"{value_s * scale:.3g} {unit}"
    return f"{value_s:.3g} s" if value_s < 1000 else f"{value_s:.0f} s"


def show_span(value_s: float) -> str:
    """Seconds, minutes, hours or days as text: `45 s`, `12 min`, `3.1 h`, `24 days`."""
    for limit, scale, unit in ((2.0, 86400.0, "days"), (2.0, 3600.0, "h"), (5.0, 60.0, "min")):
        if value_s >= limit * scale:
            return f"{value_s / scale:,.3g} {unit}"
    return show_seconds(value_s)


def show_interval(low_s: float, high_s: float) -> str:
    """`80%: 52 s to 86.6 s`."""
    return f"80%: {show_seconds(low_s)} to {show_seconds(high_s)}"


def rounded(value: float) -> float:
    """Rounded to four digits."""
    return float(f"{value:.4g}")
