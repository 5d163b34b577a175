"""Control flow, one entry per loop or branch: its bodies, its wiring, how often it runs, how it is lowered.

Each tensor that crosses the border of a body does so through a *port*, and has one signature there. A carried
value has the same signature whenever a trip begins or ends. A scanned value is a slice of its outer tensor,
so that the loop's own dim stays whole and the others may be split.

Words: docs/glossary.md.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from sbp.compat import core
from sbp.passes.program.graph import Const, Node, Operand
from sbp.signature import NdSbp, Split

ADDS = ("add", "add_any")
WHILE_TRIPS = 100
"""How often a loop of unknown length is assumed to run, when costs are compared."""


@dataclass(frozen=True, slots=True)
class Port:
    """One tensor at the border of the bodies.

    Arguments:
      operand, result: positions at the op, or None.
      enters: value ids inside the bodies that receive it.
      leaves: what bodies hand back through it.
      bodies: per end that leaves, the position of its body.
      stacked: whether the outer tensor has the loop's dim in front.
      whole: whether every device must have it whole (a predicate: all devices take the same branch).
    """

    operand: int | None = None
    result: int | None = None
    enters: tuple[int, ...] = ()
    leaves: tuple[Operand, ...] = ()
    bodies: tuple[int, ...] = ()
    stacked: bool = False
    whole: bool = False

    def outer(self, nd: NdSbp) -> NdSbp:
        """The signature outside that an inner signature means."""
        return tuple(Split(s.dim + 1) if self.stacked and isinstance(s, Split) else s for s in nd)

    def left_by(self, body: int) -> list[Operand]:
        """What one of the bodies hands back."""
        return [x for x, k in zip(self.leaves, self.bodies, strict=True) if k == body]


Tensors: TypeAlias = tuple[jax.Array, ...]
Leaving: TypeAlias = Sequence[tuple[Operand, NdSbp]]
"""What a body hands back, and as what."""


@dataclass(frozen=True)
class Region:
    """One loop or branch, with what enters it.

    Arguments:
      node: the op.
      ports, inner_signatures: its ports and the signature of each inside.
      outer: the local tensor of each port that has an operand.
      body: runs the body of a number on tensors that enter, by port.
    """

    node: Node
    ports: tuple[Port, ...]
    inner_signatures: tuple[NdSbp, ...]
    outer: Mapping[int, jax.Array]
    body: Callable[[int, Mapping[int, jax.Array], Leaving], list[jax.Array]]

    def where(self, holds: Callable[[Port], bool]) -> list[int]:
        """The ports for which something holds."""
        return [i for i, p in enumerate(self.ports) if holds(p)]

    def take(self, at: Sequence[int]) -> Tensors:
        """The tensors that enter through some ports."""
        return tuple(self.outer[i] for i in at)

    def without(self, at: Sequence[int]) -> dict[int, jax.Array]:
        """The tensors that enter through the other ports."""
        return {i: x for i, x in self.outer.items() if i not in at}

    def leaving_values(self, at: Sequence[int], k: int = 0) -> Leaving:
        """What leaves through some ports: the end number `k` of each."""
        return [(self.ports[i].leaves[k], self.inner_signatures[i]) for i in at]


def _scan_ports(node: Node) -> Iterable[Port]:
    body = node.bodies[0]
    consts, carry = core.scan_counts(node.params, len(node.inputs))
    for i, v in enumerate(body.inputs):
        if i < consts:
            yield Port(operand=i, enters=(v,))
        elif i < consts + carry:
            k = i - consts
            yield Port(operand=i, result=k, enters=(v,), leaves=(body.outputs[k],), bodies=(0,))
        else:
            yield Port(operand=i, enters=(v,), stacked=True)
    for k in range(carry, len(body.outputs)):
        yield Port(result=k, leaves=(body.outputs[k],), bodies=(0,), stacked=True)


def _while_ports(node: Node) -> Iterable[Port]:
    test, body = node.bodies
    n_test, n_body = node.params["cond_nconsts"], node.params["body_nconsts"]
    yield Port(leaves=(test.outputs[0],), bodies=(0,), whole=True)
    yield from (Port(operand=i, enters=(test.inputs[i],)) for i in range(n_test))
    yield from (Port(operand=n_test + i, enters=(body.inputs[i],)) for i in range(n_body))
    for k, out in enumerate(body.outputs):
        enters = (test.inputs[n_test + k], body.inputs[n_body + k])
        yield Port(operand=n_test + n_body + k, result=k, enters=enters, leaves=(out,), bodies=(1,))


def _cond_ports(node: Node) -> Iterable[Port]:
    every = tuple(range(len(node.bodies)))
    yield Port(operand=0, whole=True)
    for i in range(len(node.inputs) - 1):
        yield Port(operand=i + 1, enters=tuple(b.inputs[i] for b in node.bodies))
    for k in range(len(node.outputs)):
        yield Port(result=k, leaves=tuple(b.outputs[k] for b in node.bodies), bodies=every)


def _lower_scan(r: Region) -> list[jax.Array]:
    """A scan over local slices; what it only reads is closed over."""
    carried = r.where(lambda p: p.operand is not None and p.result is not None)
    stacked = r.where(lambda p: p.operand is None)
    summed = summed_ports(r.node, r.ports, r.inner_signatures)
    sliced = r.where(lambda p: p.operand is not None and p.stacked)
    sliced = [i for i in sliced if i not in summed.values()]
    fixed, leaving = r.without([*carried, *sliced, *summed.values()]), r.leaving_values([*carried, *stacked])

    def trip(
        carry: tuple[Tensors, Tensors], xs: tuple[jax.Array | None, Tensors]
    ) -> tuple[tuple[Tensors, Tensors], Tensors]:
        (last, sums), (at, slices) = carry, xs
        own = [lax.dynamic_index_in_dim(x, at, keepdims=False, allow_negative_indices=False) for x in sums]
        ports = [*carried, *summed.values(), *sliced]
        out = r.body(0, {**fixed, **dict(zip(ports, [*last, *own, *slices], strict=True))}, leaving)
        made = dict(zip(stacked, out[len(carried) :], strict=True))
        own = [
            lax.dynamic_update_index_in_dim(x, made.pop(k), at, 0, allow_negative_indices=False)
            for k, x in zip(summed, sums, strict=True)
        ]
        return (tuple(out[: len(carried)]), tuple(own)), tuple(made.values())

    how = {name: r.node.params[name] for name in ("length", "reverse", "unroll")}
    turns = jnp.arange(how["length"]) if summed else None
    begin = r.take(carried), r.take([*summed.values()])
    (last, sums), ys = lax.scan(trip, begin, (turns, r.take(sliced)), **how)
    added, plain = dict(zip(summed, sums, strict=True)), iter(ys)
    return [*last, *(added[k] if k in added else next(plain) for k in stacked)]


def _lower_while(r: Region) -> list[jax.Array]:
    """A while loop; its predicate is whole, so that all devices leave it together."""
    carried = r.where(lambda p: p.result is not None)
    fixed, leaving = r.without(carried), r.leaving_values(carried)
    test = r.leaving_values(r.where(lambda p: p.whole))

    def entering(carry: Tensors) -> dict[int, jax.Array]:
        return {**fixed, **dict(zip(carried, carry, strict=True))}

    out = lax.while_loop(
        lambda carry: r.body(0, entering(carry), test)[0],
        lambda carry: tuple(r.body(1, entering(carry), leaving)),
        r.take(carried),
    )
    return list(out)


def _lower_cond(r: Region) -> list[jax.Array]:
    """A branch; its index is whole, so that all devices take the same one."""
    (index,) = r.where(lambda p: p.whole)
    results = r.where(lambda p: p.result is not None)

    def branch(k: int) -> Callable[[], Tensors]:
        return lambda: tuple(r.body(k, r.without([index]), r.leaving_values(results, k)))

    return list(lax.switch(r.outer[index], [branch(k) for k in range(len(r.node.bodies))]))


def summed_ports(node: Node, wired: Sequence[Port], inside: Sequence[NdSbp]) -> dict[int, int]:
    """Ports that stack slices of a scanned operand with something added, and the port of that operand.

    Both are one array: XLA adds in place to what is carried, and would hold what is sliced beside what is
    stacked.

    Arguments:
      wired, inside: the ports of the op, and the signature of each inside.
    """
    if node.op != "scan":
        return {}
    (body,) = node.bodies
    entering = {p.enters[0]: i for i, p in enumerate(wired) if p.stacked and p.operand is not None}
    uses = Counter(x for n in body.nodes for x in n.inputs if not isinstance(x, Const)) if entering else {}
    adds = {n.outputs[0]: n for n in body.nodes if n.op in ADDS}
    found: dict[int, int] = {}
    for k, p in enumerate(wired):
        made = p.leaves[0] if p.operand is None else None
        add = None if made is None or isinstance(made, Const) else adds.get(made)
        for x in () if add is None else add.inputs:
            i = None if isinstance(x, Const) or uses[x] != 1 else entering.get(x)
            if i is not None and i not in found.values() and inside[i] == inside[k]:
                found[k] = i
                break
    return found


@dataclass(frozen=True, slots=True)
class Control:
    """What the compiler knows of a loop or a branch.

    Arguments:
      bodies: the parameters that hold its bodies, in their order.
      ports: how operands and results are wired to them.
      trips: how often the bodies run; None if that is known only when the program runs.
      lower: runs it on the shards of one device.
    """

    bodies: tuple[str, ...]
    ports: Callable[[Node], Iterable[Port]]
    trips: Callable[[Node], int | None]
    lower: Callable[[Region], list[jax.Array]]


CONTROL: Mapping[str, Control] = {
    "scan": Control(("jaxpr",), _scan_ports, lambda node: int(node.params["length"]), _lower_scan),
    "while": Control(("cond_jaxpr", "body_jaxpr"), _while_ports, lambda _: None, _lower_while),
    "cond": Control(("branches",), _cond_ports, lambda _: 1, _lower_cond),
}


def ports(node: Node) -> tuple[Port, ...]:
    """The ports of a control-flow op."""
    return tuple(CONTROL[node.op].ports(node))


def trips(node: Node) -> int:
    """How often the bodies run, as far as it is known; a loop of unknown length counts once."""
    known = CONTROL[node.op].trips(node)
    return 1 if known is None else known


def assumed_trips(node: Node) -> int:
    """How often the bodies run when costs are compared; once at least, or there is nothing to compare."""
    known = CONTROL[node.op].trips(node)
    return WHILE_TRIPS if known is None else max(known, 1)


def loop_params(params: Mapping[str, Any], consts: int, carry: int) -> dict[str, Any]:
    """The parameters of a loop with other numbers of operands; the loop itself is its body from now on."""
    kept = {name: params[name] for name in ("length", "reverse", "unroll")}
    return {**kept, "num_consts": consts, "num_carry": carry}
