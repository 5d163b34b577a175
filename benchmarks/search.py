"""Twelve programs, planned as they are and with each part of the search left out: what every part is worth.

    python -m benchmarks.search [gpt unet ...] [--parts 1,0.6] [--placement 2x4] [--without "shaken shares"]
    python -m benchmarks.search [gpt unet ...] [--parts 1,0.6] [--placement 2x4] --constants all

`--parts` are limits on memory, as parts of what the plan without a limit needs; `--effort` is that of the
options. Steps are estimated, of absent H100s. Left out are the parts that are named, one after the other;
`--without all` leaves out each. A part that wins less than 1 % on all programs is not worth its lines.
`--constants` says what half and double of constants of the search (passes/plan/constants.py) do: the smallest
and the largest step, and the counted work of all, of the usual.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

import sbp
from benchmarks import large, nets
from benchmarks.cases import Case
from models import classifier
from sbp.errors import MemoryLimitError
from sbp.passes.plan import constants, solve
from sbp.passes.plan.candidates import Strategy
from sbp.passes.plan.effort import WorkCount
from sbp.passes.search import explore, limited_space, pool, search


def classifier_case(choice: str, shape: Sequence[int], layers: int) -> Case:
    """The head of many classes in models/classifier.py."""
    args = classifier.train_step_args()
    return Case(classifier.train_step, lambda: args, (sbp.AUTO,) * len(args))


PROGRAMS: Mapping[str, tuple[Callable[[str, Sequence[int], int], Case], int]] = {
    "gpt": (large.LARGE["gpt"], 4),
    "llama": (large.LARGE["llama-scan"], 8),
    "resnet": (large.LARGE["resnet"], 50),
    "mixture": (nets.NETS["mixture"], 2),
    "ragged": (nets.NETS["ragged"], 2),
    "translation": (nets.NETS["translation"], 2),
    "unet": (nets.NETS["unet"], 3),
    "dlrm": (large.LARGE["dlrm"], 1),
    "diffusion": (nets.NETS["diffusion"], 8),
    "state-space": (nets.NETS["state-space"], 2),
    "classifier": (classifier_case, 1),
    "lstm": (nets.NETS["lstm"], 2),
}
"""By name: how they are made, and of how many layers."""


def _nothing(*_: Any, **__: Any) -> None:
    """Does nothing."""


def _as_found(space: limited_space.LimitedSpace, search: Any, fitted: Any, _: Any) -> Any:
    """Goes on from the first plan that fits."""
    space.budget, space.prices = search.budget, search.prices.best_prices()
    return fitted


PARTS: Mapping[str, tuple[tuple[Any, str, Any], ...]] = {
    "folded networks": ((constants, "ALIKE_PART", 0.0),),
    "parallelisms by name": ((search, "seeds_for", lambda *_, **__: ()),),
    "signatures that reduce first": ((Strategy, "partial_results", 0),),
    "what is exposed": ((explore.Explorer, "go_on", lambda _, chain: setattr(chain, "is_over", True)),),
    "parts of other plans": ((explore.Explorer, "cross", lambda *_: False),),
    "plans near others": (
        (pool.Space, "solve_near", _nothing),
        (limited_space.LimitedSpace, "solve_near", _nothing),
    ),
    "shaken shares": ((explore.Explorer, "shake", lambda *_: False),),
    "limits near a plan": (
        (limited_space.LimitedSpace, "counted_limit", _nothing),
        (limited_space.LimitedSpace, "keeps_limit", lambda *_: True),
    ),
    "priced starts": ((limited_space, "priced_starts", lambda *_: ()),),
    "plans combined": ((solve.Solver, "_combine", _nothing),),
    "kicks": ((constants, "KICKS", 0),),
    "missed loads": ((limited_space, "missed_loads", lambda *_: ()),),
    "asked for more": ((limited_space.LimitedSpace, "with_more", _as_found),),
    "recomputation": (
        (limited_space, "RecomputingModel", lambda *given: limited_space.RoomModel(*given[:-1])),
    ),
    "all plans of small programs": ((search, "shortest_by_trying", _nothing),),
}
"""What may be left out: attributes, and what takes their place."""


@contextlib.contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Puts others in the place of attributes meanwhile."""
    changed = list(changes)
    before = [getattr(owner, name) for owner, name, _ in changed]
    for owner, name, other in changed:
        setattr(owner, name, other)
    try:
        yield
    finally:
        for (owner, name, _), old in zip(changed, before, strict=True):
            setattr(owner, name, old)


CONSTANTS = [name for name in vars(constants) if name.isupper()]
"""All of the search."""


def times(value: Any, factor: float) -> Any:
    """A constant times a factor, a whole number of one that is.

    >>> times(3, 0.5), times((1.0, 0.5), 2.0)
    (1, (2.0, 1.0))
    """
    if isinstance(value, tuple):
        return tuple(times(x, factor) for x in value)
    return max(1, int(factor * value)) if isinstance(value, int) else factor * value


@dataclass(frozen=True)
class Row:
    """What a plan takes, and what it took to find it.

    Arguments:
      step_seconds: infinite where none was found that fits.
      work_seconds: that the search has counted.
    """

    step_seconds: float = math.inf
    memory_bytes: float = math.nan
    gap: float = math.nan
    cpu_seconds: float = math.nan
    work_seconds: float = math.nan


def planned(name: str, shape: Sequence[int], limit: float, effort: float = 1.0) -> Row:
    """A program under a limit, bytes per device."""
    make, layers = PROGRAMS[name]
    case, placement = make("auto", shape, layers), sbp.placement("h100", shape=tuple(shape))
    options = sbp.Options(cache=False, progress=False, memory_limit=limit, effort=effort)
    donated = (0, 1) if name != "classifier" else ()
    program = sbp.compile(case.step, placement, donate_argnums=donated, options=options)
    args = case.shapes()
    program.trace(*args)
    began, run, counts = time.process_time(), search.Search.run, list[WorkCount]()

    def counted(one: search.Search) -> search.FoundSignatures:
        counts.append(one.effort.count)
        return run(one)

    found = math.inf, math.nan, math.nan
    with replaced([(search.Search, "run", counted)]), contextlib.suppress(MemoryLimitError):
        plan = program.plan(*args)
        found = plan.step_seconds, plan.memory_bytes, plan.cheapest_gap
    return Row(*found, time.process_time() - began, sum(x.seconds for x in counts))


def print_parts(
    programs: Sequence[str], parts: Sequence[float], plan: Callable[..., Row], left_out: Sequence[str]
) -> None:
    """What each part is worth to each program."""
    print("| program | limit | left out | step | of the usual | memory | gap | CPU s |\n" + "|---" * 8 + "|")
    for name in programs:
        free = plan(name, math.inf)
        for part in parts:
            limit, usual = (math.inf if part == 1 else part * free.memory_bytes), math.nan
            for other in ("", *left_out):
                with replaced(PARTS.get(other, ())):
                    row = plan(name, limit)
                usual = usual if other else row.step_seconds
                print(
                    f"| {name} | {part:g} | {other} | {1e6 * row.step_seconds:.1f} us "
                    f"| {row.step_seconds / usual:.3f} | {row.memory_bytes / 1e9:.3f} GB | {row.gap:.2%} "
                    f"| {row.cpu_seconds:.1f} |",
                    flush=True,
                )


def print_constants(
    programs: Sequence[str], parts: Sequence[float], plan: Callable[..., Row], names: Sequence[str]
) -> None:
    """What half and double of each constant does to all programs together."""
    print("| constant | half: steps | work | double: steps | work |\n" + "|---" * 5 + "|")
    free = {name: plan(name, math.inf) for name in programs}
    asked = [(x, math.inf if part == 1 else part * free[x].memory_bytes) for x in programs for part in parts]
    usual = [plan(*x) for x in asked]
    for name in names:
        value, cells = getattr(constants, name), list[str]()
        for factor in (0.5, 2.0):
            with replaced([(constants, name, times(value, factor))]):
                rows = [plan(*x) for x in asked]
            steps = [a.step_seconds / b.step_seconds for a, b in zip(rows, usual, strict=True)]
            work = sum(x.work_seconds for x in rows) / sum(x.work_seconds for x in usual)
            cells += [f"{min(steps):.3f} to {max(steps):.3f}", f"{work:.2f}"]
        print(f"| {name} = {value} | " + " | ".join(cells) + " |", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.search", description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--parts", default="1,0.6", help="limits on memory")
    parser.add_argument("--placement", default="2x4")
    parser.add_argument("--effort", type=float, default=1.0)
    parser.add_argument("--without", nargs="*", default=[], help="parts, or all", metavar="PART")
    parser.add_argument("--constants", nargs="*", default=[], help="their names, or all", metavar="NAME")
    options = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    shape = tuple(map(int, options.placement.split("x")))

    def plan(name: str, limit: float) -> Row:
        return planned(name, shape, limit, options.effort)

    asked = options.programs, [float(x) for x in options.parts.split(",")], plan
    if options.constants:
        print_constants(*asked, CONSTANTS if options.constants == ["all"] else options.constants)
    else:
        print_parts(*asked, list(PARTS) if options.without == ["all"] else options.without)


if __name__ == "__main__":
    main()
