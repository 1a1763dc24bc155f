"""The one kind of error that a user is meant to read."""

from __future__ import annotations


class RaytrainError(Exception):
    """A user's mistake or an outside fault, told in one line.

    The message says what is wrong, where (file, key, line), and what to do. The command line
    prints it without a stack trace and exits with status 1.
    """
