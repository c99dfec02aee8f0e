"""Numbers as a script, a slider or a cell of a CSV file gives them, made whole or refused in one sentence."""

import math


def whole(name: str, value, least: int = 1) -> int:
    """``value`` as an int: 8, 8.0 and "8" are 8. Raises ValueError for what is not whole or less than ``least``."""
    try:
        number = float(value)
        fits = number == int(number) and number >= least
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise ValueError(f"{name} must be a whole number of at least {least}, and is {value!r}.")
    return int(number)


def positive(name: str, value, below: float = math.inf) -> float:
    """``value`` as a float above 0 and less than ``below``. Raises ValueError."""
    number = _number(value)
    if not 0 < number < below:
        limit = "" if below == math.inf else f" and below {below}"
        raise ValueError(f"{name} must be a number above 0{limit}, and is {value!r}.")
    return number


def not_negative(name: str, value) -> float:
    """``value`` as a float of at least 0. Raises ValueError."""
    number = _number(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} must be a number of at least 0, and is {value!r}.")
    return number


def _number(value) -> float:
    """NaN, which is neither above nor below anything, for what is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def missing(value) -> bool:
    """None, an empty cell of a CSV file, or the NaN that stands for one."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))
