"""Control flow: how the operands and results of a loop or a branch are wired to its bodies.

Each tensor that crosses the border of a body does so through a *port*, and has one signature there: a
carried value enters and leaves every trip alike; a scanned value is a slice of its outer tensor, so that the
loop's own dim stays whole and the others may be split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sbp import compat
from sbp.passes.program.graph import Node, Operand
from sbp.signature import NdSbp, Split

WHILE_TRIPS = 100
"""How often a loop of unknown length is assumed to run, when costs are compared."""


@dataclass(frozen=True, slots=True)
class Port:
    """One tensor at the border of the bodies.

    Arguments:
      operand, result: positions at the op, or None.
      enters: value ids inside the bodies that receive it.
      leaves: what the bodies hand back through it.
      stacked: whether the outer tensor has the loop's dim in front.
      whole: whether every device must have it whole (a predicate: all devices take the same branch).
    """

    operand: int | None = None
    result: int | None = None
    enters: tuple[int, ...] = ()
    leaves: tuple[Operand, ...] = ()
    stacked: bool = False
    whole: bool = False

    def outer(self, nd: NdSbp) -> NdSbp:
        """The signature outside that an inner signature means."""
        return tuple(Split(s.dim + 1) if self.stacked and isinstance(s, Split) else s for s in nd)


def _scan(node: Node) -> Iterable[Port]:
    body = node.bodies[0]
    consts, carry = compat.scan_counts(node.params, len(node.inputs))
    for i, v in enumerate(body.inputs):
        if i < consts:
            yield Port(operand=i, enters=(v,))
        elif i < consts + carry:
            k = i - consts
            yield Port(operand=i, result=k, enters=(v,), leaves=(body.outputs[k],))
        else:
            yield Port(operand=i, enters=(v,), stacked=True)
    for k in range(carry, len(body.outputs)):
        yield Port(result=k, leaves=(body.outputs[k],), stacked=True)


def _while(node: Node) -> Iterable[Port]:
    test, body = node.bodies
    n_test, n_body = node.params["cond_nconsts"], node.params["body_nconsts"]
    yield Port(leaves=(test.outputs[0],), whole=True)
    for i in range(n_test):
        yield Port(operand=i, enters=(test.inputs[i],))
    for i in range(n_body):
        yield Port(operand=n_test + i, enters=(body.inputs[i],))
    for k, out in enumerate(body.outputs):
        enters = (test.inputs[n_test + k], body.inputs[n_body + k])
        yield Port(operand=n_test + n_body + k, result=k, enters=enters, leaves=(out,))


def _cond(node: Node) -> Iterable[Port]:
    yield Port(operand=0, whole=True)
    for i in range(len(node.inputs) - 1):
        yield Port(operand=i + 1, enters=tuple(b.inputs[i] for b in node.bodies))
    for k in range(len(node.outputs)):
        yield Port(result=k, leaves=tuple(b.outputs[k] for b in node.bodies))


# Per control-flow op: its ports.
PORTS: dict[str, Callable[[Node], Iterable[Port]]] = {"scan": _scan, "while": _while, "cond": _cond}


def ports(node: Node) -> tuple[Port, ...]:
    """The ports of a control-flow op."""
    return tuple(PORTS[node.op](node))


def trips(node: Node) -> int:
    """How often the bodies run, as far as it is known; a loop of unknown length counts once."""
    return int(node.params["length"]) if node.op == "scan" else 1


def assumed_trips(node: Node) -> int:
    """How often the bodies run when costs are compared."""
    return WHILE_TRIPS if node.op == "while" else trips(node)
