"""The devices that a collective of HLO text connects: every notation, expanded to device ids."""

import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from sbp.runtime.hlo.parser import (
    HloTextError,
    Instruction,
    Tokens,
    closing_bracket,
    integers,
    pairs,
    split,
    tokenize,
    unquote,
)

Groups: TypeAlias = tuple[tuple[int, ...], ...]
Moves: TypeAlias = tuple[tuple[int, int], ...]

_SEND_PAIRS = "_xla_send_recv_source_target_pairs"
_CROSS_REPLICA = ("all-reduce", "all-gather", "reduce-scatter")


def groups_of(instruction: Instruction, header: dict[str, str]) -> Groups:
    """The groups of devices of a collective, in XLA's four modes (replica, partition, both, flattened ids).

    A device's id is that of its replica times the number of partitions, plus that of its partition.

    Raises:
      HloTextError: if the groups are written in no notation that is known.
    """
    replicas, partitions = (int(header.get(key, "1")) for key in ("replica_count", "num_partitions"))
    attributes = instruction.attributes
    # A mesh of permuted devices prints "mesh[...], device_ids=(...) {axes}": one value, two attributes.
    listed = _listed((*attributes.get("replica_groups", ()), *attributes.get("device_ids", ())))
    if "channel_id" not in attributes:
        groups = listed or (tuple(range(replicas)),)
        return tuple(tuple(r * partitions + p for r in g) for p in range(partitions) for g in groups)
    if attributes.get("use_global_device_ids") == ["true"]:
        return listed or (tuple(range(replicas * partitions)),)
    if instruction.opcode.removesuffix("-start") in _CROSS_REPLICA:
        groups = listed or (tuple(range(replicas)),)
        return tuple(tuple(r * partitions + p for r in g for p in range(partitions)) for g in groups)
    groups = listed or (tuple(range(partitions)),)
    return tuple(tuple(r * partitions + p for p in g) for r in range(replicas) for g in groups)


def device_groups(instruction: Instruction, header: dict[str, str]) -> Groups:
    """The sets of devices that exchange data in a collective, a permute or a send.

    Raises:
      HloTextError: if the groups are written in no notation that is known.
    """
    moves = moves_of(instruction)
    return groups_of(instruction, header) if moves is None else connected_groups(moves)


def moves_of(instruction: Instruction) -> Moves | None:
    """The (source, target) pairs of a permute or a send; None where none are stated."""
    attributes = instruction.attributes
    if "source_target_pairs" in attributes:
        return _pairs(attributes["source_target_pairs"])
    for part in split(attributes.get("frontend_attributes", ())[1:-1]):
        if part[0] == _SEND_PAIRS:  # XLA prints the list bare or as a string
            return _pairs(tokenize(unquote(part[2])) if part[2].startswith('"') else part[2:])
    return None


def _pairs(tokens: Tokens) -> Moves:
    ids = integers(tokens)
    return tuple(zip(ids[::2], ids[1::2], strict=True))


def connected_groups(moves: Iterable[tuple[int, int]]) -> Groups:
    """The sets of devices that pairs connect; a device that sends only to itself is a set of one."""
    return tuple(tuple(sorted(group)) for group in nx.connected_components(nx.Graph(list(moves))))


def _listed(tokens: Tokens) -> Groups:
    """The groups as they are written; none if the list is empty, which means all devices.

    Three notations: `{{0,1},{2,3}}`, the iota `[groups,size]<=[...]T(...)`, and `mesh['a'=2,'b'=4] {'b'}`,
    whose axes may be sub-axes: `'b':(1)2` is the outer half of it.
    """
    if not tokens:
        return ()
    if tokens[0] == "[":
        sizes = integers(tokens[1 : closing_bracket(tokens, 0)])
        return _rows(_iota(tokens[closing_bracket(tokens, 0) + 1 :]).reshape(sizes[0], -1))
    if tokens[0] == "{":
        return tuple(tuple(integers(part)) for part in split(tokens[1:-1]))
    if "{" not in tokens:
        raise HloTextError(f"replica_groups {' '.join(tokens)!r} is no list, iota or mesh[...] {{axes}}")
    return _of_mesh(tokens)


def _iota(tokens: Tokens) -> NDArray[Any]:
    """`<=[2,4]T(1,0)`: the numbers from 0 in that shape, transposed."""
    opening = tokens.index("[")
    close = closing_bracket(tokens, opening)
    sizes = integers(tokens[opening + 1 : close])
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    order = integers(tokens[close + 1 :])
    return ids.transpose(order) if order else ids


def _of_mesh(tokens: Tokens) -> Groups:
    """The groups along axes of a mesh, or along sub-axes: `'b':(2)4` has 2 of b outside of it and is of 4."""
    opening = len(tokens) - list(reversed(tokens)).index("{") - 1
    sizes = {axis: int(size) for axis, size in pairs(tokens[:opening]).items()}
    parts: list[tuple[str, int]] = []  # the mesh with each sub-axis an axis of its own
    chosen: dict[str, tuple[int, int]] = {}
    for axis in split(tokens[opening + 1 : -1]):
        name = unquote(axis[0])
        outer, size = (integers(axis[1:])[0], integers(axis[1:])[1]) if ":" in axis else (1, sizes[name])
        chosen[name] = outer, size
    shape: list[int] = []
    for name, size in sizes.items():
        outer, inner = chosen.get(name, (1, 1))
        for kind, part in (("", outer), (name, inner), ("", size // (outer * inner))):
            parts.append((kind, part))
            shape.append(part)
    ids = _mesh_ids(tokens[:opening], math.prod(shape)).reshape(shape)
    along = [next(i for i, (kind, _) in enumerate(parts) if kind == name) for name in chosen]
    others = [i for i in range(len(parts)) if i not in along]
    size = math.prod(shape[i] for i in along)
    return _rows(ids.transpose([*others, *along]).reshape(-1, size))


def _mesh_ids(tokens: Tokens, size: int) -> NDArray[Any]:
    """The device ids of a mesh in its order: listed, an iota, or counted from 0."""
    if "(" not in tokens:
        return np.arange(size)
    listed = tokens[list(tokens).index("(") + 1 : -1]
    return _iota(listed) if "[" in listed else np.array(integers(listed))


def _rows(ids: NDArray[Any]) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in ids)
