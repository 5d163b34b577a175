"""The key-value store of JAX's coordination service, and the address of this process."""

from typing import Protocol, cast

from jax._src import distributed, xla_bridge
from jax._src.lib import _jax  # type: ignore[attr-defined, unused-ignore]


class KVStore(Protocol):
    """The coordination service, which process 0 runs: values by keys that every process can read."""

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        """Sets a value."""

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """Waits for a value.

        Raises:
          JaxRuntimeError: on a time-out, and if a process or the service is gone.
        """

    def key_value_try_get_bytes(self, key: str) -> bytes:
        """A value that is set.

        Raises:
          JaxRuntimeError: if it is not set, and if a process or the service is gone.
        """

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]:
        """All values whose keys begin with this one and a slash, with their keys.

        Raises:
          JaxRuntimeError: if the service is gone.
        """

    def key_value_delete(self, key: str) -> None:
        """Deletes a value, and all whose keys begin with this one and a slash."""


def kv_store() -> KVStore | None:
    """The store of this process; None if it is the only one."""
    return cast("KVStore | None", distributed.global_state.client)


def coordinator() -> str:
    """The "host:port" of process 0, as given or as JAX has found it; "" before that."""
    return distributed.global_state.coordinator_address or ""


def set_own_address(address: str) -> None:
    """Makes gloo listen at an address of this host, and publish it; before JAX is asked for devices.

    Raises:
      RuntimeError: if JAX was asked before.
    """

    def client() -> object:
        found = distributed.global_state.client
        gloo = None if found is None else _jax.make_gloo_tcp_collectives(found, hostname=address)
        return xla_bridge.make_cpu_client(gloo)

    xla_bridge.register_backend_factory("cpu", client, priority=0, fail_quietly=False)


def own_index() -> int:
    """The number of this process, without asking for its devices."""
    return int(distributed.global_state.process_id)


def how_many() -> int:
    """The number of processes, without asking for their devices."""
    return int(distributed.global_state.num_processes)
