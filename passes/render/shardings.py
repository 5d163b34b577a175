"""Where the tensors of a plan lie, as PartitionSpecs in a Python module: for who runs it by `jax.jit`."""

from collections.abc import Iterator, Mapping, Sequence

from jax.sharding import PartitionSpec

from sbp.notation.resolve import to_partition_spec
from sbp.passes.explain.constraint_gaps import constraint_gaps
from sbp.passes.explain.plan import PlanData
from sbp.passes.physical.program import Box, Compute
from sbp.passes.program.graph import Node
from sbp.signature import NdSbp, has_partial

PRODUCTS = ("dot_general", "conv_general_dilated")
"""Ops whose results are constrained even where nothing is sent."""
DIMS = 64
"""More than any tensor has: a spec leaves out what is whole at its end."""


def shardings_of(plan: PlanData) -> Mapping[str, PartitionSpec]:
    """How arguments and results lie, by their names."""
    named = [*zip(plan.in_paths, plan.in_sbp, strict=True), *zip(plan.out_paths, plan.out_sbp, strict=True)]
    return {path: to_partition_spec(nd, DIMS, plan.placement) for path, nd in named}


def shardings_text(plan: PlanData) -> str:
    """The module."""
    n, specs = len(plan.in_paths), list(shardings_of(plan).items())
    shape = ", ".join(map(str, plan.placement.shape))
    return "\n".join(
        [
            f'"""How the tensors of {plan.name} lie on {plan.placement}, as a plan has them.',
            "",
            "Argument shardings alone do not make jax.jit follow it: what INSIDE has is to be said too, by",
            "jax.lax.with_sharding_constraint behind each line. sbp.constrain(fn, plan) does all of that.",
            *(f"It cannot be said: {u}." for u in constraint_gaps(plan)),
            '"""',
            "",
            "import jax",
            "from jax.sharding import PartitionSpec as P",
            "",
            f"AXES = {plan.placement.axes!r}",
            f"MESH = jax.make_mesh(({shape},), AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))",
            "ARGUMENTS = {",
            *(f"    {path!r}: {spec_text(spec)}," for path, spec in specs[:n]),
            "}",
            "RESULTS = {",
            *(f"    {path!r}: {spec_text(spec)}," for path, spec in specs[n:]),
            "}",
            "INSIDE = (  # line, what is made there, how it lies",
            *(
                f"    ({line!r}, {tensor!r}, {spec_text(spec)}),"
                for line, tensor, spec in inner_shardings(plan)
            ),
            ")",
            "",
        ]
    )


def spec_text(spec: PartitionSpec) -> str:
    """A spec as it is written.

    >>> spec_text(PartitionSpec(None, ("data", "model")))
    "P(None, ('data', 'model'))"
    """
    return f"P({', '.join(map(repr, spec.partitions))})"


def inner_shardings(plan: PlanData) -> Iterator[tuple[str, str, PartitionSpec]]:
    """What is to be said inside: what is sent lies so after it, and so do products; each once."""
    physical = plan.physical
    seen: set[tuple[str, str, PartitionSpec]] = set()
    for step, _ in () if physical is None else physical.walk():
        if isinstance(step, Box) and step.move.is_collective:
            found: Sequence[tuple[int, NdSbp]] = [(step.value, step.move.after)]
            source = step.source
        elif isinstance(step, Compute) and _is_product(step.node):
            found, source = list(zip(step.node.outputs, step.strategy.results, strict=True)), step.node.source
        else:
            continue
        for v, nd in found:
            value = plan.physical.graph.values[v] if plan.physical is not None else None
            if value is None or has_partial(nd):
                continue
            row = (str(source), str(value), to_partition_spec(nd, len(value.shape), plan.placement))
            if row not in seen:
                seen.add(row)
                yield row


def _is_product(node: Node) -> bool:
    return node.primitive.name in PRODUCTS
