"""What all processes do together with a folder: what is wrong in one of them is raised in all."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from sbp.compat.forks import check_not_forked
from sbp.errors import CheckpointError, Problem, raise_all
from sbp.runtime.processes.process_group import process_group
from sbp.runtime.storage.files import Path
from sbp.runtime.storage.messages import storage_failure


def agree(what: str, path: Path, action: Callable[[], Any]) -> Any:
    """What an action of process 0 gives, which JSON can hold; nobody waits for one that has failed.

    All processes come here.

    Arguments:
      what: is done, for who waits.
      path: for messages.
      action: done by each process.

    Raises:
      CheckpointError: of the same class in all processes, if the action failed in one of them.
    """
    check_not_forked(f"{what} in {path}")
    value, found, cause = None, tuple[Problem, ...](), None
    try:
        value = action()
    except CheckpointError as e:
        found, cause = tuple(e.problems), e.__cause__
    except Exception as e:
        found, cause = (storage_failure(path, e),), e
    if (others := process_group()) is not None:
        told = others.gather(what, {"problems": [asdict(p) for p in found], "value": value})
        wrong: Mapping[str, Any] = next((one for one in told if one["problems"]), told[0])
        found = found or tuple(Problem(**p) for p in wrong["problems"])
        value = told[0]["value"]
    try:
        raise_all(found)
    except CheckpointError as e:
        raise e from cause
    return value
