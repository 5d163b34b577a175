"""Lines of arguments and results at rest: every leaf is in one, and says what it takes of a device."""

from pathlib import Path

import jax
import numpy as np
import optax

import sbp
from sbp import B, S
from sbp.passes.explain.rest_lines import argument_bytes, collapse, rest_lines
from sbp.passes.face import load_plan
from sbp.signature import parse_sbp


def test_collapse_keeps_every_leaf() -> None:
    rng = np.random.default_rng(0)
    kinds = [parse_sbp(t) for t in ("[B, B]", "[S(0), B]", "[B, S(1)]")]
    for _ in range(50):
        paths = [f"p['l'][{i}]['{k}']" for i in range(3) for k in "abc"] + ["p['e']", "x", "s[0].mu['a']"]
        sbps = [kinds[i] for i in rng.integers(0, 3, len(paths))]
        lines = collapse(paths, sbps)
        assert sum(n for _, _, n in lines) == len(paths)
        for nd in kinds:
            assert sum(n for _, s, n in lines if s == nd) == sbps.count(nd)


def test_collapse_of_a_part_names_the_part() -> None:
    b = parse_sbp("[B]")
    assert collapse(["p['a']", "p['b']"], [b, b]) == [("p", b, 2)]
    assert collapse(["p['a']"], [b], ["p['a']", "p['b']"]) == [("p['a']", b, 1)]


def test_arguments_say_what_they_take_of_a_device(tmp_path: Path) -> None:
    """Moments that lie alike are one line; a plan that was loaded says the same."""
    tx = optax.adam(0.1)

    def step(w: jax.Array, state: optax.OptState, x: jax.Array) -> tuple[jax.Array, optax.OptState]:
        added, state = tx.update(jax.grad(lambda w: (x @ w).sum())(w), state)
        return w + added, state

    w = np.ones((16, 8), np.float32)
    place = sbp.placement("cpu", shape=(2, 4))
    program = sbp.compile(step, place, in_sbp=([B, S(1)], [B, S(1)], [S(0), B]))
    plan = program.plan(w, tx.init(w), np.ones((32, 16), np.float32))
    assert argument_bytes(plan) == [128, 4, 128, 128, 1024]
    lines = [remark for _, _, remark in rest_lines(plan)[0]]
    assert lines == ["128 B", "4 B", "256 B in 2 leaves", "1.02 kB"]
    plan.save(tmp_path / "plan.json")
    assert rest_lines(load_plan(tmp_path / "plan.json")) == rest_lines(plan)
