"""`check_plan`: everything that a saved plan says, against what its own program adds up to.

Recomputed exactly: which version of which tensor every step finds; whether each collective leads from what it
takes to what it gives, and what one device sends in it; the time of collectives where the hardware has a rate
per link and no tables, of element-wise work, of memory traffic and of launches; all sums (seconds, bytes,
numbers of collectives, each row of the plan); arguments and results at rest, and their bytes at the peak.

Taken as given: the FLOPs and the traffic of an op and how often a loop runs; the rates of the hardware; the
time of products and of collectives where it comes from measured tables (a product may not be faster than
the peak rate, and equal collectives take equal time); which temporaries live at the peak; the overlap (its
time lies between that of the kernels alone and that of everything in a row); the proven bound, which may not
be above the time. Which signatures an op may have is known of a few ops only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sbp.checker.program import RELATIVE, Walk, rest_bytes, same, simple_peak
from sbp.checker.shards import read_signature
from sbp.text.json_reader import json_of

SPARE = 0.25
"""Of temporaries, what may lie unused between them."""


@dataclass(frozen=True)
class CheckReport:
    """What became of a check.

    Arguments:
      name: of the plan.
      wrong: all complaints.
      figures: what was recomputed, with its name.
      parts: those of the placements of a plan with stages.
    """

    name: str
    wrong: tuple[str, ...]
    figures: tuple[tuple[str, str], ...] = ()
    parts: tuple[CheckReport, ...] = ()

    @property
    def complaints(self) -> tuple[str, ...]:
        """Those of all parts."""
        return (*self.wrong, *(f"{p.name}: {c}" for p in self.parts for c in p.complaints))

    def __str__(self) -> str:
        found = self.complaints
        verdict = f"{len(found)} figures or steps are wrong" if found else "everything adds up"
        lines = [f"{self.name}: {verdict}", *(f"  - {c}" for c in found)]
        for part in (self, *self.parts):
            lines += [f"  {part.name}"] if self.parts and part.figures else []
            width = max((len(name) for name, _ in part.figures), default=0)
            lines += [f"  {name:<{width}}  {text}" for name, text in part.figures]
        return "\n".join(lines)


def check_file(path: str | os.PathLike[str]) -> CheckReport:
    """Checks a file that `Plan.save("plan.json")` wrote.

    Raises:
      OSError, ValueError: if it cannot be read as JSON.
    """
    return check_plan(json_of(Path(path).read_text(encoding="utf-8")))


def check_plan(plan: Mapping[str, Any]) -> CheckReport:
    """Checks the data of a plan."""
    if not isinstance(plan, Mapping):
        return CheckReport("?", (f"a {type(plan).__name__} is no plan",))
    name = str(plan.get("name", "?"))
    try:
        if "stages" in plan:
            return _staged(name, plan)
        if "program" not in plan:
            return CheckReport(name, ("it has no program: save it again with this version",))
        return _checked(name, plan)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, StopIteration) as e:
        return CheckReport(name, (f"a field is missing or has no legal value: {type(e).__name__}: {e}",))


def _checked(name: str, plan: Mapping[str, Any]) -> CheckReport:
    walk = Walk(plan)
    size = math.prod(walk.mesh)
    if len(set(plan["placement"]["ranks"])) != size:
        walk.complain("the placement", [f"its hierarchy has {size} devices"])
    walk.run()
    walk.complain("at rest", _ends(plan))
    walk.complain("the rows", _rows(plan, walk))
    walk.complain("the totals", _totals(plan, walk))
    rest, simple = rest_bytes(walk, plan["donated"]), _simple(walk)
    walk.complain("memory", _memory(plan, walk, rest))
    t = walk.tally
    sent = sum(row["sent"] for row in t.rows.values())
    figures = (
        ("steps", f"{t.ops} ops, {t.moves} moves, {len(t.rows)} rows"),
        ("seconds", f"{t.seconds:.6g}, of which kernels {t.kernel_seconds:.6g}"),
        ("sent", f"{sent:.6g} bytes per device"),
        ("memory", f"{rest:.6g} bytes at rest; with nothing merged {rest + simple:.6g} at the peak"),
        ("gap", f"{_gap(plan):.3g}"),
    )
    return CheckReport(name, tuple(walk.wrong), figures)


def _simple(walk: Walk) -> float:
    p = walk.program
    inputs = [(v, read_signature(nd)) for v, nd in p["inputs"]]
    outputs = [(v, read_signature(nd)) for v, nd in p["outputs"] if v is not None]
    return simple_peak(walk, p["steps"], outputs, [*inputs, *outputs])


def _gap(plan: Mapping[str, Any]) -> float:
    return (plan["seconds"] - plan["bound"]) / plan["seconds"] if plan["seconds"] > 0 else 0.0


def _ends(plan: Mapping[str, Any]) -> Iterator[str]:
    """The signatures of arguments and results, which the plan says twice."""
    inside = plan["program"]
    for what, said, found in (
        ("argument", plan["in_sbp"], inside["inputs"]),
        ("result", plan["out_sbp"], inside["outputs"]),
    ):
        for i, (nd, (_, at)) in enumerate(zip(said, found, strict=False)):
            if nd != at:
                yield f"{what} {i} is {nd} in the plan, and {at} in its program"
        if len(said) > len(found):
            yield f"the plan has {len(said)} {what}s, and its program {len(found)}"


def _rows(plan: Mapping[str, Any], walk: Walk) -> Iterator[str]:
    """Every row of the plan against the steps that it stands for."""
    rows, axes = plan["collectives"], plan["placement"]["axes"]
    for k in range(max(len(rows), max(walk.tally.rows, default=-1) + 1)):
        if k >= len(rows):
            yield f"row {k} is missing: {walk.tally.rows[k]['where']} sends something"
            continue
        row, found = rows[k], walk.tally.rows.get(k)
        if found is None:
            yield f"row {k} ({row['kind']} of {row['tensor']}): no step sends it"
            continue
        for key, text in (
            ("kind", row["kind"]),
            ("axes", [axes.index(a) for a in row["axes"]]),
            ("before", read_signature(row["before"])),
            ("after", read_signature(row["after"])),
            ("shape", row["shape"]),
            ("dtype", row["dtype"]),
        ):
            if key in found and found[key] != text:
                yield f"row {k}: {key} {text}, and {found['where']} has {found[key]}"
        for key, said in (("times", row["count"]), ("sent", row["wire_bytes"]), ("seconds", row["seconds"])):
            if not same(said, found[key]):
                what = f"row {k} ({row['kind']} of {row['tensor']})"
                yield f"{what}: {key} {said:.9g}, and it should be {found[key]:.9g}"
        group = math.prod(walk.mesh[a] for a in found["axes"])
        if row["group_size"] != group:
            yield f"row {k}: groups of {row['group_size']} devices, and these axes have {group}"
        if not -1e-15 <= row["exposed_seconds"] <= plan["step_seconds"] * (1 + RELATIVE):
            yield f"row {k}: {row['exposed_seconds']:.6g} s exposed of {plan['step_seconds']:.6g} s"


def _totals(plan: Mapping[str, Any], walk: Walk) -> Iterator[str]:
    t = walk.tally
    if not same(plan["seconds"], t.seconds):
        yield f"{plan['seconds']:.9g} s, and the steps add up to {t.seconds:.9g} s"
    if plan["bound"] > plan["seconds"] * (1 + RELATIVE):
        yield f"the bound {plan['bound']:.9g} s is above the time {plan['seconds']:.9g} s"
    least, most = t.kernel_seconds * (1 - RELATIVE), plan["seconds"] * (1 + RELATIVE)
    if not least <= plan["step_seconds"] <= most:
        said = f"{plan['step_seconds']:.6g} s with overlap"
        yield f"{said}: kernels alone take {least:.6g}, and all in a row {most:.6g}"


def _memory(plan: Mapping[str, Any], walk: Walk, rest: float) -> Iterator[str]:
    """The peak: what is at rest is there all the time, and all that is named adds up."""
    said, program = plan["memory_bytes"], walk.program
    if "peak" not in program:
        return  # that of a placement with a schedule, which holds several micro-batches
    if said < rest * (1 - RELATIVE):
        yield f"{said:.9g} bytes at the peak, and {rest:.9g} at rest"
    live: dict[Any, list[float]] = {}
    for v, nd, n in program["peak"]:
        live.setdefault((v, nd), []).append(n)
    ends = {(v, nd) for v, nd in (*program["inputs"], *program["outputs"])}
    # What an op holds beside its result goes by its name; of an argument, one entry is the tensor itself.
    for v, nd in program["inputs"]:
        part, counted = walk.bytes((v, read_signature(nd))), live.get((v, nd), [])
        if not any(same(n, part) for n in counted):
            yield f"argument value {v} as {nd} counts {counted}, and its part has {part:.9g} bytes"
    total = math.fsum(n for found in live.values() for n in found)
    temporary = total - math.fsum(min(found) for x, found in live.items() if x in ends)
    between = program["between_bytes"]
    if not same(said, total + between):
        yield f"{said:.9g} bytes at the peak, and what is named adds up to {total + between:.9g}"
    if not -RELATIVE * said <= between <= SPARE * temporary + RELATIVE * said:
        yield f"{between:.6g} bytes lie between {temporary:.6g} bytes of temporaries"


def _staged(name: str, plan: Mapping[str, Any]) -> CheckReport:
    """A plan with stages: each placement's program, and what the whole says of them."""
    parts = tuple(check_plan(p) for p in plan["stages"])
    wrong: list[str] = []
    inside = [c for p in plan["stages"] for c in p["collectives"]]
    if plan["collectives"][: len(inside)] != inside:
        wrong.append("its collectives are not those of its placements")
    if any(c["kind"] != "send" for c in plan["collectives"][len(inside) :]):
        wrong.append("a collective belongs to no placement")
    if not same(plan["memory_bytes"], max(p["memory_bytes"] for p in plan["stages"])):
        wrong.append("its peak is not that of the placement that holds most")
    if plan["bound"] > plan["seconds"] * (1 + RELATIVE):
        wrong.append(f"the bound {plan['bound']:.9g} s is above the time {plan['seconds']:.9g} s")
    return CheckReport(name, tuple(wrong), (("gap", f"{_gap(plan):.3g}"),), parts)
