"""Checks of parameters, whose messages name the parameter, its value and what would be right. Torch-free."""

from __future__ import annotations

import math
import numbers


def check_bool(name: str, value: object) -> None:
    """Raises ValueError unless it is one."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless it is one of these."""
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {listed}, got {value!r}")


def integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """The value as an int; raises ValueError unless it is one in [low, high]. None: any, from low on."""
    expected = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    integer = int(value)
    if integer < low or (high is not None and integer > high):
        raise ValueError(f"{name} must be {expected}, got {integer}")
    return integer


def real(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> float:
    """The value as a float; raises ValueError unless it is one in [low, high], or (low, high] if low_open."""
    expected = f"a number in {'(' if low_open else '['}{low:g}, {high:g}]"
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an integer too large for a float
        number = math.inf
    if not low <= number <= high or (low_open and number == low):  # NaN fails the comparison
        raise ValueError(f"{name} must be {expected}, got {value}")
    return number
