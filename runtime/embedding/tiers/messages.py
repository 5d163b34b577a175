"""What can be wrong with tiers and their stores, in words."""

from collections.abc import Sequence
from pathlib import Path

from sbp.errors import Problem, StoreError
from sbp.text.units import bytes_text


def problem(where: object, got: str, legal: str, why: str, fix: str) -> StoreError:
    """What is wrong with something at a path."""
    return StoreError(Problem("store", str(where), got, legal, why, fix))


def not_sorted(folder: Path, got: str) -> StoreError:
    """Keys or rows of a call that are not as a store takes them."""
    legal = "keys in ascending order, each once, and a row of bytes for each"
    return problem(f"rows for {folder}", got, legal, "files are sorted by key", "np.unique(keys)")


def other_layout(folder: Path, wanted: str, there: str) -> StoreError:
    """A store of other rows."""
    return problem(
        folder,
        f"a store of {there}",
        wanted,
        "a row is a vector and its optimizer's state: another table or optimizer has written this store",
        "the tables and the optimizer that it was made with, or an empty folder",
    )


def odd_width(folder: Path, width: int) -> StoreError:
    """Rows that are not made of words."""
    legal = "a multiple of 8 bytes"
    return problem(
        folder, f"rows of {width} bytes", legal, "rows are checked by words of 8 bytes", "pad them"
    )


def no_store(folder: Path) -> StoreError:
    """A folder of something else."""
    return problem(
        folder,
        "a folder with files, and no version of a store among them",
        "an empty folder, or one that a store has written",
        "a store removes files of its folder that no version names",
        "another folder",
    )


def unknown_version(folder: Path, version: int, known: str) -> StoreError:
    """A version that is not there."""
    got, legal = f"version {version}", f"one of {known}" if known else "none: it is empty"
    return problem(folder, got, legal, "versions that nobody keeps are removed", "a version that is kept")


def other_format(path: Path, got: str) -> StoreError:
    """A file of another version of this library, or one that is damaged."""
    return problem(
        path, got, "a file of this format", "it was changed or written by another version", "a copy"
    )


def in_use(folder: Path) -> StoreError:
    """A store that another process has open."""
    why = "one process writes to a store: two would remove each other's files"
    return problem(
        folder, "a store that another process has open", "a store of one's own", why, "wait for it"
    )


def damaged_bytes(path: Path, what: str) -> StoreError:
    """Bytes that are not those that were written."""
    return problem(
        path,
        what,
        "the bytes that were written",
        "training must not go on with wrong rows",
        "an older version, or a copy of this file",
    )


def no_space(folder: Path, needed: int, free: int) -> StoreError:
    """A full disk."""
    return problem(
        folder,
        f"no space for {bytes_text(needed)}: {bytes_text(free)} are free",
        "space for the rows of a pass, and for those that are merged",
        "what is there already is whole, and can be read",
        "space on the disk, or keep(...) of fewer versions",
    )


def too_small(folder: Path, given: int, least: int) -> StoreError:
    """A budget of the host that is less than a row takes."""
    return problem(
        f"a cache of {folder}",
        bytes_text(given),
        f"{bytes_text(least)} or more",
        "a row and what is held for it",
        "more of the host's memory",
    )


def not_written(folder: Path, error: OSError) -> StoreError:
    """What the file system has raised."""
    why = "what is there already is whole, and can be read"
    return problem(
        folder, str(error), "a disk that can be written", why, "the rights of the folder, and its disk"
    )


# -- tables over tiers


def _tiered(got: str, legal: str, why: str, fix: str, where: str = "Tiered(...)") -> Problem:
    return Problem("embedding", where, got, legal, why, fix)


def not_tiered(table: str, got: str) -> Problem:
    """A table that lies otherwise than by rows."""
    why = "a pass has some rows of many tables, by key"
    fix = "the plain kind, or a Collection of its own beside these"
    return _tiered(got, "RowWise(), Uncompressed()", why, fix, f"table {table!r}")


def count(name: str, got: int) -> Problem:
    """A number that is below 1."""
    return _tiered(f"{name}={got}", "1 or more", "it counts something that is there", f"leave {name} out")


def too_many_tables(got: int) -> Problem:
    """More tables than keys can name."""
    why = "a key has 16 bits for its table"
    return _tiered(f"{got} tables", "fewer than 65536", why, "features that share a table")


def device_too_small(given: float, least: float) -> Problem:
    """A budget of the devices that holds no rows."""
    why = "each part of each table has a row at least"
    return _tiered(f"device={bytes_text(given)}", f"{bytes_text(least)} or more", why, "a larger budget")


def host_too_small(given: float, least: float) -> Problem:
    """A budget of the host that does not hold the keys of a pass."""
    why = "the host has the key of each slot, a quarter of its budget at most"
    fix = "a larger budget of the host, or a smaller one of the devices: then a pass has fewer rows"
    return _tiered(f"host={bytes_text(given)}", f"{bytes_text(least)} or more", why, fix)


def batch_too_large(step: int, size: float, share: float, needed: float) -> Problem:
    """A batch that takes too much of the host."""
    return _tiered(
        f"{bytes_text(size)} of arrays",
        f"{bytes_text(share)}, which the budget of the host has for a pass of batches",
        "a pass has one batch at least; the host has three passes of them, and the rows",
        f"host={bytes_text(needed)!r}, or smaller batches",
        f"the batch of step {step + 1}",
    )


def pass_too_small(step: int, rows: int, slots: int, needed: int, needed_bytes: float) -> Problem:
    """A batch whose rows do not fit."""
    return _tiered(
        f"{rows:,} rows",
        f"about {slots:,}, which the budget of the devices holds",
        "a pass has one batch at least, whose rows are on the devices all at once",
        f"device={bytes_text(needed_bytes)!r} for this batch ({needed:,} slots), or smaller batches",
        f"the batch of step {step + 1}",
    )


def step_too_large(limit: float, needed: float, rows: float) -> Problem:
    """A limit of the devices that no pass keeps to."""
    got = f"{bytes_text(limit)} of each device"
    why = f"with the smallest pass, whose rows take {bytes_text(rows)}, a step takes this, by XLA"
    return _tiered(got, f"{bytes_text(needed)} or more", why, "a larger budget, or smaller batches", "a step")


def no_ids(names: Sequence[str], found: int) -> Problem:
    """A batch without ids, or with several sets of them."""
    shown = ", ".join(map(repr, names[:4])) + (", ..." if len(names) > 4 else "")
    got = f"{found} dicts with the features {shown}"
    fix = "TierFeed(..., ids=, put=) say where the ids of a batch are"
    return _tiered(got, "one", "ids become slots", fix, "a batch of a tiered feed")


def no_iterator(kind: str) -> Problem:
    """Batches that cannot be had again."""
    why = (
        "batches are read ahead, a pass at a time, and a run that goes on begins behind those it has trained"
    )
    fix = "a function of the step, a list, or an object with batches_from(step)"
    return _tiered(f"an iterator ({kind})", "batches that can begin at any step", why, fix, "TierFeed(...)")


def other_batches(step: int, differing: Sequence[int]) -> Problem:
    """Processes that do not have the batches of process 0."""
    got = f"process {', '.join(map(str, differing))} with other batches than process 0"
    why = "every process moves its own rows of all that a pass needs"
    fix = "whole batches in each, and fit without own_rows"
    return _tiered(got, "the same batches in all", why, fix, f"the pass behind step {step}")


def ids_and_put() -> Problem:
    """Half of where ids are."""
    why = "ids are taken out of a batch, and slots put in their place"
    return _tiered("one of ids= and put=", "both, or neither", why, "the other one too", "TierFeed(...)")


def other_state(stack: str, leaves: Sequence[str], made: Sequence[str]) -> Problem:
    """A state that is not of the optimizer."""
    why = "rows of new keys begin as the tables and the optimizer begin"
    legal = "the tables and " + (", ".join(made) or "nothing else by row")
    fix = "the optimizer that has made the state"
    return _tiered(", ".join(leaves), legal, why, fix, f"arrays with a line per row of {stack!r}")


def other_shardings(table: str, leaves: Sequence[str]) -> Problem:
    """Arrays that do not lie by rows."""
    got = f"{', '.join(leaves)} in another sharding" if leaves else "no array with a line per slot"
    fix = "in_sbp of tiered.tables.in_sbp(placement, axes, like=...), and state placed by the step"
    why = "each device reads and writes its own rows"
    return _tiered(got, "rows split over the axes of Tiered(...)", why, fix, f"a state, of table {table!r}")


def other_slots(there: str, given: str) -> Problem:
    """A checkpoint of another budget."""
    why = "the rows of the pass are in the checkpoint's arrays, by slot"
    fix = "the budget, axes and parts of that run; save(state) and a folder's rows alone go to any"
    return _tiered(f"{given} slots", there, why, fix, "a checkpoint with tiers")


def no_table(table: str, known: Sequence[str]) -> Problem:
    """A table that is not there."""
    legal = ", ".join(map(repr, known))
    return _tiered(repr(table), legal, "rows are read by table", "the name in its TableConfig", "read(...)")


def no_key() -> Problem:
    """A training without first parameters."""
    why = "rows of new keys are made with this key"
    return _tiered("no key", "tiered.init(key)", why, "params = tiered.init(key), also where a run goes on")


def rows_there(folder: Path, rows: int) -> StoreError:
    """A store with rows, and a training that begins."""
    return problem(
        folder,
        f"a store with {rows:,} rows",
        "an empty one for a training that begins",
        "the net beside the rows would begin anew, and the rows would not",
        "the checkpoint of that training, another folder, or tiered.open() to begin with these rows",
    )
