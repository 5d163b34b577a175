"""What can be wrong with the arrays of a state, in words."""

from collections.abc import Sequence

from sbp.errors import Problem
from sbp.runtime.storage.messages import MOST_SHOWN, problem


def no_array(leaf: str, got: str) -> Problem:
    """A leaf of a state that is no array."""
    legal = "arrays of numbers, of truth values or of keys, and numbers of at most 64 bits"
    fix = "extra= takes it, if JSON can hold it: text, and the state of a NumPy generator"
    return problem(f"state{leaf}", got, legal, "a leaf is written as an array", fix)


def other_state(path: object, differs: Sequence[str]) -> Problem:
    """A checkpoint of something else."""
    more = f"; and {len(differs) - MOST_SHOWN} more" if len(differs) > MOST_SHOWN else ""
    got = "; ".join(differs[:MOST_SHOWN]) + more
    why = "a checkpoint is restored into a state of its own shape"
    fix = "like=... of the model that was saved; only=... for a part of it, dtype=... for another precision"
    return problem(path, got, "the leaves that were saved", why, fix)


def no_part(path: object, keys: Sequence[object], tops: Sequence[str]) -> Problem:
    """A part of a state that is not in it."""
    why = "only= takes the key of a part, or a tuple of keys, outermost first"
    return problem(path, f"only={tuple(keys)!r}", f"one of {', '.join(tops)}", why, "only=... one of these")
