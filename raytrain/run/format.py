"""How times, shares and counts are written for people."""

from __future__ import annotations

import math
from collections.abc import Mapping


def duration(seconds: float) -> str:
    """A time in words: `8.4 s`, `10 m 28 s`, `2 h 05 m`."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} m"


def percent(share: float | None, digits: int = 2) -> str:
    """A share 0..1 as a percentage: 0.7512 -> `75.12 %`; nothing known -> `-`."""
    if share is None or not math.isfinite(share):
        return "-"
    return f"{100 * share:.{digits}f} %"


def rate(images_per_s: float) -> str:
    """Images a second, with three digits that mean something and thousands set apart."""
    if not math.isfinite(images_per_s):
        return "-"
    return f"{images_per_s:,.0f}" if images_per_s >= 100 else f"{images_per_s:.3g}"


def number(value: float) -> str:
    """A hyperparameter or loss in few digits: `0.1`, `1.25e-05`, `2.303`."""
    return f"{value:.4g}" if math.isfinite(value) else "not finite"


def goal(target: Mapping[str, float]) -> str:
    """A target in words: `top-1 75 % and top-5 93 %`."""
    parts = [f"{key.replace('top', 'top-')} {100 * share:g} %" for key, share in target.items()]
    return " and ".join(parts)
