"""Axes of one device change no plan, wherever they stand and whatever is said along them."""

import random
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from models import mlp
from sbp import AUTO, B, P, S
from sbp.errors import SbpError
from sbp.passes.explain.plan import PlanData
from tests.conformance.random_code import Program, draw_program, function, tensor
from tests.conformance.random_programs import SPLITTING
from tests.runtime.source.equal import bits

SAID = re.compile(r"\[((?:S\(\d\)|B|P)(?:, (?:S\(\d\)|B|P))*)\]")


def wider(program: Program, units: list[bool], rng: random.Random) -> Program:
    """The same program on a grid with axes of one device, along which signatures say anything.

    Arguments:
      units: of each axis, whether it has one device.
    """

    def longer(nd: Any, at_rest: bool) -> Any:
        if nd is None:
            return None
        given, dims = iter(nd), [s for s in nd if isinstance(s, type(S(0)))]
        return [rng.choice([B, *dims, *([] if at_rest else [P])]) if unit else next(given) for unit in units]

    def said(found: re.Match[str]) -> str:
        nd = eval(f"[{found[1]}]", {"S": S, "B": B, "P": P})
        return f"[{', '.join(map(repr, longer(nd, at_rest=False)))}]"

    shape = iter(np.shape(program.grid))
    grid = np.reshape(program.grid, [1 if unit else next(shape) for unit in units]).tolist()
    return replace(
        program,
        grid=grid,
        inputs=tuple(replace(x, sbp=longer(x.sbp, at_rest=True)) for x in program.inputs),
        lines=tuple(replace(line, text=SAID.sub(said, line.text)) for line in program.lines),
        outs=tuple((i, longer(nd, at_rest=True)) for i, nd in program.outs),
    )


def compiled(program: Program) -> sbp.Program:
    outs: Any = [AUTO if nd is None else nd for _, nd in program.outs]
    hardware = SPLITTING if program.splitting else None
    return sbp.compile(
        function(program),
        sbp.placement("cpu", program.grid),
        in_sbp=tuple(AUTO if x.sbp is None else x.sbp for x in program.inputs),
        out_sbp=(outs, None) if program.wrt else outs,
        options=sbp.Options(hardware=hardware, cache=False),
    )


def figures(plan: PlanData, axes: list[int]) -> Any:
    """All that a plan says, along some axes."""
    rows = [
        (c.kind, c.count, c.wire_bytes, c.seconds, [plan.placement.axes.index(a) for a in c.axes])
        for c in plan.collectives
    ]
    where = {a: k for k, a in enumerate(axes)}
    lying = [[[nd[a] for a in axes] for nd in side] for side in (plan.in_sbp, plan.out_sbp)]
    sent = [(*row, [where[a] for a in across]) for *row, across in rows]
    return plan.step_seconds, plan.seconds, plan.memory_bytes, sent, lying


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_have_the_same_plan(seed: int) -> None:
    rng = random.Random(seed)
    program = draw_program(rng.choice)
    units = [False] * np.ndim(program.grid) + [True] * rng.choice([1, 2, 4])
    rng.shuffle(units)
    args = [tensor(x.at, x.shape, x.dtype) for x in program.inputs]
    try:
        plain = compiled(program)
        plan = plain.plan(*args)
    except SbpError:
        pytest.skip("refused")
    wide = compiled(wider(program, units, rng))
    axes = [k for k, unit in enumerate(units) if not unit]
    assert figures(wide.plan(*args), axes) == figures(plan, list(range(len(axes))))
    for got, want in zip(jax.tree.leaves(wide(*args)), jax.tree.leaves(plain(*args)), strict=True):
        assert bits(got).tobytes() == bits(want).tobytes()


def test_ten_axes_of_one_device_take_no_time() -> None:
    """MaxText's mesh has twelve axes, ten of them of one device: the network has the states of the two."""
    names = tuple("abcdefghijkl")
    placement = sbp.placement("cpu", shape=(1, 2, 1, 1, 1, 1, 1, 1, 1, 4, 1, 1), axes=names)
    program = sbp.compile(mlp.train_step, placement, options=sbp.Options(cache=False))
    plan = program.plan(*mlp.train_step_args())
    assert len(plan.in_sbp[0]) == 12
    small = sbp.compile(mlp.train_step, sbp.placement("cpu", shape=(2, 4)), options=sbp.Options(cache=False))
    assert figures(plan, [1, 9]) == figures(small.plan(*mlp.train_step_args()), [0, 1])


def test_named_axes_and_results_keep_their_mesh() -> None:
    """A `PartitionSpec` may name an axis of one device anywhere, before an outer one too."""
    mesh = jax.make_mesh((1, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec

    def double(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(
            2 * x, jax.sharding.NamedSharding(mesh, spec("data", "model"))
        )

    program = sbp.compile(
        double, mesh, in_sbp=(spec(None, ("model", "data")),), out_sbp=spec(("data", "model"))
    )
    x = jnp.arange(64.0).reshape(8, 8)
    out = program(x)
    np.testing.assert_array_equal(out, 2 * x)
    assert out.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, spec("model")), 2)
    assert out.sharding.mesh.axis_names == ("data", "model")
