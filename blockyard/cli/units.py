"""Formats numbers for a terminal."""

from __future__ import annotations

MINUTE, HOUR, DAY = 60, 3600, 86400
_BLOCKS = " ▏▎▍▌▋▊▉█"


def span(seconds: float) -> str:
    """Formats a duration in its two largest units, rounded down."""
    whole = int(seconds)
    for large, small, first, second in ((DAY, HOUR, "d", "h"), (HOUR, MINUTE, "h", "min"), (MINUTE, 1, "min", "s")):
        if whole >= large:
            return f"{whole // large} {first} {whole % large // small} {second}"
    return f"{whole} s"


def milliseconds(seconds: float) -> str:
    """Formats a short duration with about three digits."""
    if seconds >= 10:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.{0 if seconds >= 0.1 else 1 if seconds >= 0.01 else 2}f} ms"


def size(num_bytes: float) -> str:
    """Formats bytes in the largest unit of which there is at least one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 100 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def count(number: int) -> str:
    """Formats a large number as millions or billions, with about three digits."""
    if number >= 1e9:
        return f"{number / 1e9:.2f} billion"
    return f"{number / 1e6:.3g} million" if number >= 1e6 else f"{number:,}"


def rate(per_second: float) -> str:
    """Formats a rate per second: with commas between thousands, and one decimal below ten."""
    return f"{per_second:,.0f}" if per_second >= 10 or per_second == 0 else f"{per_second:.1f}"


def bar(share: float, width: int) -> str:
    """Draws a share of 0 to 1 as a bar of `width` characters, in eighths of a character."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_BLOCKS[rest] if rest else "")).ljust(width)
