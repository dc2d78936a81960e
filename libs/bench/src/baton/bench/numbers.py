"""Numbers as a reader wants them."""

import math


def plain(value: float, digits: int = 3) -> str:
    """So many significant digits, and never an exponent: 0.859, 10.7, 1,870."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    rounded = float(f"{value:.{digits}g}")
    num_decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    text = f"{rounded:,.{num_decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
