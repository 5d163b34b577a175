"""One program, step by step: who has what, what every step does and takes, and what is held at most."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sbp.checker.moves import COLLECTIVES, Rates, element_bytes, sent_bytes, wrong_move, wrong_permute
from sbp.checker.shards import Signed, divides, elements, fits, is_partial, read_signature

RELATIVE = 1e-7
"""Sums that differ by less are the same in another order."""
Held = tuple[int, Signed]
"""A value under one signature."""
Json = Mapping[str, Any]

ELEMENT_WISE = frozenset(
    "exp exp2 log log1p expm1 sin cos tan tanh logistic sqrt rsqrt cbrt erf erfc abs sign floor ceil round "
    "integer_pow square not is_finite asin acos atan sinh cosh".split()
)
"""Ops of one operand whose result lies as that does, and that cannot be computed of a sum's parts."""


def same(a: float, b: float) -> bool:
    """Whether two figures are one, added up differently."""
    return abs(a - b) <= RELATIVE * max(abs(a), abs(b)) + 1e-15


@dataclass
class StepTotals:
    """What is added up on the way.

    Arguments:
      seconds, kernel_seconds: of all steps, and of what is not sent.
      rows: per row of the plan, how often it runs, what one device sends then, and its seconds.
      ops, moves: how many there are.
    """

    seconds: float = 0.0
    kernel_seconds: float = 0.0
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    ops: int = 0
    moves: int = 0


class Walk:
    """Goes through the steps of a program once; `wrong` has all complaints."""

    def __init__(self, plan: Json) -> None:
        self.program, self.placement = plan["program"], plan["placement"]
        self.mesh: list[int] = self.placement["shape"]
        self.platform = plan["hardware"]["platform"]
        self.rates = Rates(plan["hardware"], self.placement)
        self.values = {int(v): x for v, x in self.program["values"].items()}
        self.wrong: list[str] = []
        self.tally = StepTotals()
        self.known_seconds: dict[Any, float] = {}

    def complain(self, where: str, complaints: Iterable[str]) -> None:
        self.wrong += [f"{where}: {c}" for c in complaints]

    def version(self, x: Sequence[Any], where: str) -> Held:
        """A version, checked against its value."""
        v, nd = x[0], read_signature(x[1])
        if not fits(self.values[v][0], nd, self.mesh):
            self.complain(where, [f"{x[1]} does not fit value {v} of shape {self.values[v][0]}"])
        return v, nd

    def bytes(self, held: Held) -> float:
        """Of one device's part."""
        shape, _, itemsize = self.values[held[0]]
        return elements(shape, held[1], self.mesh) * float(itemsize)

    def run(self) -> None:
        """The whole program: what arrives, all steps, and what leaves."""
        have = set[Held]()
        have.update(self.at_rest(x, "an argument") for x in self.program["inputs"])
        self.steps(self.program["steps"], have, 1, 1, "step")
        for x in self.program["outputs"]:
            if x[0] is not None and self.at_rest(x, "a result") not in have:
                self.complain("the results", [f"value {x[0]} leaves as {x[1]}, and nobody has made it so"])

    def at_rest(self, x: Sequence[Any], what: str) -> Held:
        held = self.version(x, what)
        if any(map(is_partial, held[1])):
            self.complain(what, [f"value {x[0]} is {x[1]}: a sum never crosses the boundary"])
        elif not divides(self.values[held[0]][0], held[1], self.mesh):
            self.complain(what, [f"value {x[0]} is {x[1]}, which does not divide"])
        return held

    def steps(self, steps: Sequence[Json], have: set[Held], times: int, assumed: int, name: str) -> None:
        """Some steps, in order; `have` grows by what they make."""
        for i, step in enumerate(steps):
            at = f"{name} {i}"
            if "move" in step:
                self.move(step, have, times, assumed, f"{at} ({step['move']} of value {step['value']})")
            elif "loop" in step:
                self.loop(step, have, times, assumed, f"{at} ({step['loop']} at {step['at']})")
            else:
                self.op(step, have, times, assumed, f"{at} ({step['op']} at {step['at']})")

    def read_values(self, step: Json, have: set[Held], where: str) -> list[Held]:
        """What a step reads, which must be there."""
        read = [self.version(x, where) for x in step["reads"]]
        missing = [x for x, held in zip(step["reads"], read, strict=True) if held not in have]
        self.complain(where, [f"reads value {v} as {nd}, which nobody has made" for v, nd in missing])
        return read

    def move(self, step: Json, have: set[Held], times: int, assumed: int, where: str) -> None:
        v, kind, axes = step["value"], step["move"], step["axes"]
        before, after = self.version([v, step["before"]], where), self.version([v, step["after"]], where)
        if before not in have:
            self.complain(where, [f"takes it as {step['before']}, which nobody has made"])
        have.add(after)
        shape, dtype, itemsize = self.values[v]
        wrong = list(wrong_move(kind, axes, before[1], after[1]))
        if kind == "permute" and not wrong:
            wrong += wrong_permute(shape, before[1], after[1], self.mesh)
        self.complain(where, wrong)
        if wrong:
            return
        self.tally.moves += 1
        dtype, itemsize = step.get("sent_as", (dtype, itemsize))
        if "sent_as" in step and (is_partial(before[1][axes[0]]) or itemsize >= self.values[v][2]):
            self.complain(where, [f"goes as {dtype}, which is not narrower, or where a sum is added up"])
        each = element_bytes(kind, dtype, itemsize, before[1][axes[0]], self.platform)
        sent = each * sent_bytes(kind, axes, before[1], after[1], shape, self.mesh)
        over = range(len(self.mesh)) if kind == "permute" else axes
        if kind not in COLLECTIVES:
            takes = self.rates.local_seconds(kind, self.bytes(after))
            self.expect(where, "takes", step["seconds"], takes)
        else:
            self.collective(where, kind, over, sent, step["seconds"])
        self.tally.seconds += assumed * step["seconds"]
        if sent > 0:
            said = {"kind": kind, "before": before[1], "after": after[1], "shape": shape, "dtype": dtype}
            self.row(step, said | {"axes": axes}, sent, times, assumed, where)
        else:
            self.tally.kernel_seconds += assumed * step["seconds"]

    def collective(self, where: str, kind: str, axes: Iterable[int], sent: float, seconds: float) -> None:
        """Its time: by the links if these are all there is to it, else the same whenever it is the same."""
        key = kind, tuple(axes), round(sent, 3)
        if self.rates.formula:
            takes = self.rates.collective_seconds(key[1], sent)
            if not abs(seconds - takes) <= RELATIVE * takes + 2e-12:
                self.complain(where, [f"takes {seconds:.6g} s, and the links say {takes:.6g} s"])
        elif not same(self.known_seconds.setdefault(key, seconds), seconds):
            self.complain(where, [f"takes {seconds:.6g} s, and an equal one {self.known_seconds[key]:.6g} s"])
        elif seconds < 0 or (sent > 0 and seconds == 0):
            self.complain(where, [f"sends {sent:.6g} bytes in {seconds:.6g} s"])

    def row(self, step: Json, said: Json, sent: float, times: int, assumed: int, where: str) -> None:
        """What is sent, for the row of the plan that it belongs to."""
        if step.get("row") is None:
            self.complain(where, [f"sends {sent:.6g} bytes, and the plan has no row for it"])
            return
        counted = {"times": times, "sent": times * sent, "seconds": assumed * step["seconds"], "where": where}
        known = self.tally.rows.setdefault(step["row"], dict(said) | counted)
        if (known["kind"], known["sent"]) != (said["kind"], times * sent):
            self.complain(where, [f"has row {step['row']}, which is that of {known['where']}"])

    def expect(self, where: str, verb: str, said: float, found: float) -> None:
        if not same(said, found):
            self.complain(where, [f"{verb} {said:.9g}, and it should be {found:.9g}"])

    def op(self, step: Json, have: set[Held], times: int, assumed: int, where: str) -> None:
        read = self.read_values(step, have, where)
        made = [self.version(x, where) for x in step["writes"]]
        have.update(made)
        self.tally.ops += 1
        self.complain(where, _wrong_op(step["op"], read, made, self.values))
        work, talking = step["work"], sum(s["seconds"] for s in step["sends"])
        memory = self.rates._per(work["traffic_bytes"], self.rates.hardware["memory_bytes_per_second"])
        arithmetic, exact = self.rates.arithmetic_seconds(work)
        launch = self.rates.hardware["launch_seconds"] if work["launches"] else 0.0
        least = max(arithmetic, memory) + launch + talking
        if exact:
            self.expect(where, "takes", step["seconds"], least)
        elif step["seconds"] < least * (1 - RELATIVE):
            self.complain(
                where, [f"takes {step['seconds']:.6g} s, and no such device does it in less than {least:.6g}"]
            )
        self.complain(where, self.wrong_product(step, read, made))
        for s in step["sends"]:
            self.collective(where, s["kind"], s["axes"], s["wire_bytes"], s["seconds"])
            self.row(s, {"kind": s["kind"], "axes": s["axes"]}, s["wire_bytes"], times, assumed, where)
        self.tally.seconds += assumed * step["seconds"]
        self.tally.kernel_seconds += assumed * (step["seconds"] - talking)

    def wrong_product(self, step: Json, read: Sequence[Held], made: Sequence[Held]) -> Iterator[str]:
        """Whether a product has the sizes of its parts."""
        if step["op"] != "dot_general" or "product" not in step["work"] or len(read) != 2:
            return
        batch, m, n, k, _ = step["work"]["product"]
        a, b, c = (elements(self.values[v][0], nd, self.mesh) for v, nd in (*read, *made))
        if {(batch * m * k, batch * k * n, batch * m * n)} - {(a, b, c), (b, a, c)}:
            product = f"{batch} x [{m}, {k}] @ [{k}, {n}]"
            yield f"multiplies {product}, and its parts have {a}, {b} and {c} elements"

    def loop(self, step: Json, have: set[Held], times: int, assumed: int, where: str) -> None:
        """A loop or a branch: bodies see what is outside, and what enters them."""
        self.read_values(step, have, where)
        inner = times * step["trips"], assumed * step["assumed_trips"]
        for k, body in enumerate(step["bodies"]):
            inside = have | {self.version(x, where) for x in step["enters"][k]}
            self.steps(body, inside, *inner, f"{where}, body {k}, step")
            missing = [x for x in step["leaves"][k] if self.version(x, where) not in inside]
            self.complain(where, [f"hands back value {v} as {nd}, which nobody made" for v, nd in missing])
        have.update(self.version(x, where) for x in step["writes"])


def _wrong_op(
    op: str, read: Sequence[Held], made: Sequence[Held], values: Mapping[int, Sequence[Any]]
) -> Iterator[str]:
    """What some ops cannot do, whatever a rule says: of most the checker knows nothing."""
    if op in ELEMENT_WISE and len(read) == len(made) == 1:
        if read[0][1] != made[0][1] and not any(x.startswith("P(") for x in (*read[0][1], *made[0][1])):
            yield f"makes {list(made[0][1])} of {list(read[0][1])}, element by element"
        if "P" in read[0][1] and op not in ("not",):
            yield "is computed of the parts of a sum, which is not the sum of what it makes of them"
    elif (
        op in ("mul", "div") and len(read) == 2 and len({tuple(values[v][0]) for v, _ in (*read, *made)}) == 1
    ):
        for a, (x, y, z) in enumerate(zip(read[0][1], read[1][1], made[0][1], strict=True)):
            if x == "P" and y == "P":
                yield f"two sums are {op}-ed part by part along axis {a}"
            if z.startswith("S") and not (x == y == z):
                yield f"makes {z} of {x} and {y} along axis {a}, element by element"


def simple_peak(walk: Walk, steps: Sequence[Json], kept: Iterable[Held], there: Iterable[Held]) -> float:
    """The most that lives at once in some steps, bytes, with nothing merged and nothing written over.

    Arguments:
      kept, there: what is needed after the last step, and what is there before the first (not counted).
    """
    born: dict[Held, int] = {}
    dies: dict[Held, int] = {}
    extra = [0.0] * (len(steps) + 1)
    outside = set(there)
    for i, step in enumerate(steps):
        for held in _reads(step):
            dies[held] = i
        for held in _writes(step):
            born.setdefault(held, i)
            dies[held] = max(dies.get(held, i), i)
        for k, body in enumerate(step.get("bodies", ())):
            leaves = [(v, read_signature(nd)) for v, nd in step["leaves"][k]]
            enters = sum(walk.bytes((v, read_signature(nd))) for v, nd in step["enters"][k])
            extra[i] = max(extra[i], enters + simple_peak(walk, body, leaves, outside | born.keys()))
    for held in kept:
        dies[held] = len(steps)
    change = [0.0] * (len(steps) + 2)
    for held, start in born.items():
        if held not in outside:
            n = walk.bytes(held)
            change[start] += n
            change[dies[held] + 1] -= n
    now, most = 0.0, 0.0
    for i in range(len(steps) + 1):
        now += change[i]
        most = max(most, now + extra[i])
    return most


def _reads(step: Json) -> list[Held]:
    if "move" in step:
        return [(step["value"], read_signature(step["before"]))]
    return [(v, read_signature(nd)) for v, nd in step["reads"]]


def _writes(step: Json) -> list[Held]:
    if "move" in step:
        return [(step["value"], read_signature(step["after"]))]
    return [(v, read_signature(nd)) for v, nd in step["writes"]]


def rest_bytes(walk: Walk, donated: Sequence[int]) -> float:
    """Arguments and results between two steps; a result may take the place of a donated argument."""
    inputs = [(v, read_signature(nd)) for v, nd in walk.program["inputs"]]
    outputs = [(v, read_signature(nd)) for v, nd in walk.program["outputs"] if v is not None]

    def kind(held: Held) -> Any:
        return tuple(walk.values[held[0]][0]), walk.values[held[0]][1], held[1]

    free: dict[Any, int] = {}
    for i in donated:
        free[kind(inputs[i])] = free.get(kind(inputs[i]), 0) + 1
    total = math.fsum(walk.bytes(x) for x in dict.fromkeys(inputs))
    for held in dict.fromkeys(outputs):
        if free.get(kind(held), 0):
            free[kind(held)] -= 1
        elif held not in inputs:
            total += walk.bytes(held)
    return total
