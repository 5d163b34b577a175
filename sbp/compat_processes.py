"""The board on which JAX lets processes leave words for each other."""

from __future__ import annotations

from typing import Protocol, cast

import jax
from jax._src import distributed


class Board(Protocol):
    """The coordination service, which process 0 runs: values by keys, that every process can read."""

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        """Leaves a value."""

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """A value, once it is there.

        Raises:
          JaxRuntimeError: when the time is over, and when a process or the service is gone.
        """

    def key_value_try_get_bytes(self, key: str) -> bytes:
        """A value that is there.

        Raises:
          JaxRuntimeError: if it is not, and when a process or the service is gone.
        """


def board() -> Board | None:
    """The board of this process; None where it is the only one."""
    return cast("Board | None", distributed.global_state.client)


def is_late(error: jax.errors.JaxRuntimeError) -> bool:
    """Whether an error says that something had not come in time."""
    return "DEADLINE_EXCEEDED" in str(error)


def own_index() -> int:
    """The number of this process, without a look at its devices."""
    return int(distributed.global_state.process_id)


def how_many() -> int:
    """The number of processes, without a look at their devices."""
    return int(distributed.global_state.num_processes)
