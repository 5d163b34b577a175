"""orbax, which writes and reads the arrays, and epath, which it brings: imported when they are needed."""

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from sbp.compat.orbax_loops import drain_loops
from sbp.errors import CheckpointError
from sbp.runtime.storage import messages


@functools.cache
def orbax() -> ModuleType:
    """`orbax.checkpoint`.

    Raises:
      CheckpointError: if it is not installed.
    """
    found = _imported("orbax.checkpoint")
    said = logging.getLogger("absl")
    said.setLevel(logging.WARNING)
    said.addFilter(_is_not_raised_too)
    drain_loops()
    return found


def _is_not_raised_too(record: logging.LogRecord) -> bool:
    """Not what orbax logs of an error in its threads, with pages of their stacks: it raises that, too."""
    return "_SignalingThread.run() raised an exception" not in record.getMessage()


def epath_module() -> ModuleType:
    """`etils.epath`.

    Raises:
      CheckpointError: if it is not installed.
    """
    return _imported("etils.epath")


def check_arrays_go_to(url: str, s3_endpoint: Callable[[], Mapping[str, str]]) -> None:
    """Sees that orbax writes the arrays of a URL into its object store: of itself it knows no `s3://`.

    Arguments:
      s3_endpoint: where `s3://` is, for TensorStore.

    Raises:
      CheckpointError: if this version of orbax does not.
    """
    if url.startswith("s3://"):
        orbax()
        if not _write_arrays_to_s3(s3_endpoint):
            raise CheckpointError(messages.no_arrays_there(url, _imported("orbax.checkpoint").__version__))


@functools.cache
def _write_arrays_to_s3(s3_endpoint: Callable[[], Mapping[str, str]]) -> bool:
    try:
        orbax = importlib.import_module("sbp.compat.orbax")
    except ImportError:  # that version has not what is asked there
        return False
    return bool(orbax.write_arrays_to_s3(s3_endpoint))


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise CheckpointError(messages.not_installed()) from None


def open_stored(folder: str, name: str) -> Any:
    """A handle of TensorStore to an array that orbax has written: see `compat.orbax`."""
    return importlib.import_module("sbp.compat.orbax").open_stored(folder, name)


def handler() -> Any:
    """orbax's handler; the copies on the host are those of the arrays themselves, which we checksum."""
    return orbax().PyTreeCheckpointHandler(enable_pinned_host_transfer=False)
