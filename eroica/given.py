"""Numbers that options are given, for the `type` of argparse.

What is wrong with one is said in a sentence that names it; argparse puts the option before it. Used by the commands.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable


def amount(below: float, what: str = "number") -> Callable[[str], float]:
    """A number between 0 and `below`, both left out. `what`: as the sentence calls it."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 < value < below:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {what} above 0")
        return value

    return parse


def count(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
