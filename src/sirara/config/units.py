"""Sizes and times as people write them: `512GiB` is bytes, `30m` is seconds."""

import re
from fractions import Fraction

SIZE_UNITS = {
    "B": 1,
    **{f"{prefix}iB": 1 << (10 * n) for n, prefix in enumerate("KMGTP", start=1)},
    **{f"{prefix}B": 1000**n for n, prefix in enumerate("KMGTP", start=1)},
}
TIME_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def parse_size_bytes(text: str) -> int:
    """Whole bytes of `1.5GiB` or `2 GB`, rounded down: `0.1GiB` is 107374182.

    Raises:  ValueError that says which units there are, or that it is less than a byte.
    """
    number, factor = _split(text, SIZE_UNITS, "512GiB")
    size = Fraction(number) * Fraction(factor)
    if 0 < size < 1:
        raise ValueError(f"is {float(size)} bytes, less than one")
    return int(size)


def parse_time_s(text: str) -> float:
    """Seconds of `30m` or `1.5 h`.

    Raises:  ValueError that says which units there are.
    """
    number, factor = _split(text, TIME_UNITS, "30m")
    return float(number) * factor


def format_size(size_bytes: int) -> str:
    """The shortest exact form: 1536 -> `1536B`, 2**30 -> `1GiB`."""
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % SIZE_UNITS[unit] == 0:
            return f"{size_bytes // SIZE_UNITS[unit]}{unit}"
    return f"{size_bytes}B"


def format_time(time_s: float) -> str:
    """The shortest exact form: 90 -> `90s`, 600 -> `10m`."""
    for unit in ("d", "h", "m"):
        if time_s and time_s % TIME_UNITS[unit] == 0:
            return f"{time_s / TIME_UNITS[unit]:.0f}{unit}"
    return f"{time_s!r}s".replace(".0s", "s")


def _split(text: str, units: dict[str, float] | dict[str, int], example: str) -> tuple[str, float]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"needs a number and a unit like {example}")
    number, unit = match.groups()
    # B and b differ in some trades, M and m differ in ours only between sizes and times.
    known = {name.lower(): factor for name, factor in units.items()}
    if unit.lower() not in known:
        raise ValueError(f"has the unknown unit {unit!r}; use one of {', '.join(units)}")
    return number, known[unit.lower()]
