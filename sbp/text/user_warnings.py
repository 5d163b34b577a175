"""Warnings that point at the line of the user's program that called this package."""

import sys
import warnings

OWN = frozenset(("sbp", "jax", "functools", "contextlib"))
"""Packages that stand between the user's line and a warning."""


def warn_user(text: str) -> None:
    """Warns at the nearest line that is in no package of `OWN`.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn_user("a table is updated whole")
    >>> str(caught[0].message)
    'sbp: a table is updated whole'
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in OWN:
        frame, level = frame.f_back, level + 1
    warnings.warn(f"sbp: {text}", stacklevel=level)
