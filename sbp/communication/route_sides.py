"""The sides of a route: which rows of a line each device holds of an operand, and needs of a result.

An op that moves rows is described by its sides alone; `sbp.communication.route` finds out who sends what.
docs/communication.md has an example.
"""

from dataclasses import dataclass

from sbp.communication.extents import Extent, coordinates_along


@dataclass(frozen=True, slots=True)
class SideRun:
    """Consecutive rows, on the line and on a device.

    Arguments:
      start: the place of the first one on the line.
      rows: how many.
      at: the place of the first one among the device's rows.
    """

    start: int
    rows: int
    at: int = 0


@dataclass(frozen=True, slots=True)
class Side:
    """One operand or result: the part of the line that each device holds or needs.

    Arguments:
      extent: the dim.
      runs: per device along the axes that split it.
      height: the rows of one shard in the exchange.
      partial: of a result: the axes along which it is a sum; a device takes only the rows of its own place
        along them, and zeros stand for the rest.
    """

    extent: Extent
    runs: tuple[SideRun, ...]
    height: int
    partial: tuple[int, ...] = ()


def operand_side(base: Extent, start: int = 0, step: int = 1) -> Side:
    """An operand of which every `step`-th row is on the line, from row `start` on (it may lie outside).

    With `step` > 1 a device's shard is first cut down by `keep_every`.
    """
    runs = []
    for at in coordinates_along(base.axes, base.hierarchy):
        first, valid = base.offset(at), base.valid(at)
        phase = (start - first) % step
        runs.append(SideRun((first + phase - start) // step, max(0, -(-(valid - phase) // step))))
    return Side(base, tuple(runs), -(-base.local // step))


def result_side(out: Extent, start: int = 0, partial: tuple[int, ...] = ()) -> Side:
    """A result whose first row has the place `start` on the line."""
    coords = coordinates_along(out.axes, out.hierarchy)
    runs = tuple(SideRun(start + out.offset(at), out.valid(at)) for at in coords)
    return Side(out, runs, out.local, partial)


def held_reversed(base: Extent) -> Side:
    """An operand whose last row comes first; a device first reverses its shard, padding included."""
    runs = []
    for at in coordinates_along(base.axes, base.hierarchy):
        first, valid = base.offset(at), base.valid(at)
        runs.append(SideRun(base.size - first - valid, valid, base.local - valid))
    return Side(base, tuple(runs), base.local)
