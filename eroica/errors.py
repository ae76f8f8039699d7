"""The three errors eroica raises on purpose, told apart by who must act.

Everything else is a bug in eroica and crashes with a traceback. Only `eroica.cli` turns these into exit statuses;
no other module prints or exits.
"""

from __future__ import annotations


class EroicaError(Exception):
    """Base of the errors below. The message names the thing, the value seen and the way out, in one sentence."""


class UserError(EroicaError):
    """The caller can mend it: a wrong option, a missing file, two files that claim the same rank."""


class DataError(EroicaError):
    """The input cannot be used at all. Input that is only partly broken is loaded, and its loss is counted, instead."""


class UnavailableError(EroicaError):
    """A peer is down or an optional dependency is not installed; trying later or installing it helps."""
