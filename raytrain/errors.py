"""The one kind of error that a user is meant to read."""

from __future__ import annotations

import traceback
from pathlib import Path


class RaytrainError(Exception):
    """A user's mistake or an outside fault, told in one line.

    The message says what is wrong, where (file, key, line), and what to do. The command line
    prints it without a stack trace and exits with status 1.
    """


def describe_bug(error: BaseException) -> str:
    """An error of a user's own code in one line, with the line of code that raised it.

    The line is the innermost one outside of installed packages, where there is one.
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parent)
    own = [
        f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(ours)
    ]
    where = own[-1] if own else frames[-1] if frames else None
    text = next((line for line in str(error).splitlines() if line.strip()), "no message").strip()
    place = f" ({where.filename}:{where.lineno} in {where.name})" if where else ""
    return f"{type(error).__name__}: {text}{place}"
