"""What can be wrong with a store of rows, in words."""

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


def damaged(path: Path, what: str) -> StoreError:
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
