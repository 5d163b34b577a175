"""When host arrays are compared with those of other processes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sbp.errors import ArgumentError
from sbp.runtime.execute.host_input_check import HostInputCheck, digest


class Asked:
    """A team that notes what it is asked, and finds what it is told to."""

    def __init__(self, **found: tuple[int, int]) -> None:
        self.asked: list[list[str]] = []
        self.found = {key[1:]: two for key, two in found.items()}

    def differing_keys(self, name: str, mine: dict[str, str]) -> dict[str, tuple[int, int]]:
        self.asked.append(sorted(mine))
        return self.found


def given(*xs: Any) -> list[tuple[Any, bool]]:
    return [(x, True) for x in xs]


def test_each_argument_is_compared_once() -> None:
    alike, process_group = HostInputCheck(), Asked()
    ones = np.ones(4)
    assert alike.lacks(())
    alike.check(process_group, "f", "abc", [(ones, True), (ones, False), (2, True)])  # type: ignore[arg-type]
    assert process_group.asked == [["0", "2"]]  # of the second this process has nothing, and does not know
    assert not alike.lacks((0, 1, 2))
    alike.check(process_group, "f", "abc", given(ones, ones, 3))  # type: ignore[arg-type]
    assert len(process_group.asked) == 1


def test_alone_nothing_is_compared() -> None:
    alike = HostInputCheck()
    alike.check(None, "f", "a", given(np.ones(4)))
    assert not alike.lacks((0,))


def test_what_differs_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"f: b\n.*other values in process 2 than in process 0"):
        HostInputCheck().check(Asked(_1=(0, 2)), "f", "abc", given(1, 2, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda i: np.arange(i, i + 6).reshape(2, 3).T,
        lambda i: np.zeros((0, 3)) if i == 0 else np.ones((1, 3)),
        lambda i: np.array([i], ml_dtypes.bfloat16),
        lambda i: np.array([bool(i)]),
        lambda i: np.array(i),
        lambda i: float(i),
        lambda i: jnp.full(3, i),
        lambda i: jax.random.key(i),
    ],
)
def test_digests_are_of_values(make: Any) -> None:
    assert digest(make(0)) == digest(make(0)) != digest(make(1))


def test_nan_is_as_good_as_itself() -> None:
    assert digest(np.array([np.nan])) == digest(np.array([np.nan]))
