"""Reading arrays under any layout, and comparing what was read with the checksums of what was handed over."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from sbp.compat.untyped import Leaf, PyTree
from sbp.runtime.arrays.checksums import WORD, Box, box_of, checksum
from sbp.runtime.arrays.state import LeafRecord
from sbp.runtime.processes.process_group import process_group
from sbp.runtime.storage.files import Path
from sbp.runtime.storage.libraries import handler, orbax


def read_arrays(at: Path, abstract: PyTree, keys: Sequence[str | int]) -> PyTree:
    """The arrays of a state, or of a part of it, as orbax reads them; its errors are raised as they are.

    Arguments:
      at: the folder of the arrays.
      abstract: what is wanted, of the structure that was saved.
      keys: of the part in the saved state, outermost first.
    """
    return _part_read(handler(), at, abstract, keys) if keys else _restored(handler(), at, abstract)


def differing_leaves(name: str, records: Sequence[LeafRecord], found: PyTree) -> list[str]:
    """The leaves whose elements are not those that were written; all processes say the same.

    Arguments:
      name: of what was read, for who waits.
      records: of the leaves.
      found: the state, in the layout that it was read in; each process looks at its parts.
    """
    leaves = jax.tree.leaves(found)
    mine = {i: _sums(x) for i, x in enumerate(leaves)}
    whole = {i for i, x in enumerate(leaves) if sum(map(_volume, mine[i])) == np.size(x)}
    wrong = {i for i in whole if _total([mine[i]]) != records[i].checksum}
    if (group := process_group()) is not None:
        rest = {str(i): [[*box, s] for box, s in x.items()] for i, x in mine.items() if i not in whole}
        every = group.gather(f"checksums of {name}", {"wrong": sorted(wrong), "parts": rest})
        wrong |= {i for one in every for i in one["wrong"]}
        for i in {i for one in every for i in one["parts"]}:
            held = [{_box(p): p[-1] for p in one["parts"].get(i, ())} for one in every]
            wrong |= {int(i)} if _total(held) != records[int(i)].checksum else set()
    return [records[i].path for i in sorted(wrong)]


# -- inside


def _restored(reader: Any, at: Path, item: PyTree) -> PyTree:
    ocp = orbax()
    args = ocp.args.PyTreeRestore(item, restore_args=ocp.checkpoint_utils.construct_restore_args(item))
    return reader.restore(at, args=args)


def _part_read(reader: Any, at: Path, abstract: PyTree, keys: Sequence[str | int]) -> PyTree:
    """A part of a state; placeholders stand for what is around it."""
    ocp = orbax()
    found = reader.metadata(at)
    around = jax.tree.map(lambda _: ocp.PLACEHOLDER, getattr(found, "tree", found))
    is_leaf = jax.tree_util.all_leaves([abstract])
    part = abstract if is_leaf else ocp.tree.serialize_tree(abstract, keep_empty_nodes=True)
    read = _restored(reader, at, _with_part(around, keys, part))
    for key in keys:
        read = read[_spelled(read, key)]
    return read if is_leaf else ocp.tree.deserialize_tree(read, abstract)


def _with_part(around: PyTree, keys: Sequence[str | int], part: PyTree) -> PyTree:
    if not keys:
        return part
    key = _spelled(around, keys[0])
    inner = _with_part(around[key], keys[1:], part)
    if isinstance(around, dict):
        return {**around, key: inner}
    return [inner if i == key else x for i, x in enumerate(around)]


def _spelled(tree: PyTree, key: str | int) -> str | int:
    """A key as orbax has it: in dicts they are strings."""
    return str(key) if isinstance(tree, dict) else int(key)


def _sums(x: Leaf) -> dict[Box, int]:
    """The checksums of the parts that this process has, each once, by where they lie."""
    if not isinstance(x, jax.Array):
        values = np.asarray(x)
        box = tuple((0, n) for n in values.shape)
        return {box: checksum(values, box, values.shape)}
    parts = {box_of(s.index, x.shape): s for s in x.addressable_shards}
    return {box: checksum(np.asarray(s.data), box, x.shape) for box, s in parts.items()}


def _volume(box: Box) -> int:
    return int(np.prod([end - start for start, end in box], dtype=np.int64))


def _box(flat: Sequence[Any]) -> Box:
    return tuple((int(start), int(end)) for start, end in flat[:-1])


def _total(held: Sequence[Mapping[Box, int]]) -> int | None:
    """The checksum of an array of whose parts each process has some; None if two differ on one part."""
    parts = dict[Box, int]()
    for one in held:
        if any(parts.setdefault(box, value) != value for box, value in one.items()):
            return None
    return sum(parts.values()) % WORD
