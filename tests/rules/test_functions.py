"""Parameters that hold functions: a rule accounts for each, or the op runs whole."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import B, S
from sbp.compat import core
from sbp.passes.program.graph import Node
from sbp.passes.program.trace import trace
from sbp.passes.program.views import op_of
from sbp.rules import REGISTRY, Op
from sbp.rules.entry import all_broadcast
from sbp.rules.registry import unknown_functions, valid_rows
from tests.rules.test_claims import SAMPLES

LINE = sbp.placement("cpu", shape=(8,))
# What is computed where two updates meet stands in the op's name; JAX makes no select_and_scatter.
SAID_BY_NAME = set("scatter-add scatter-sub scatter-mul scatter-min scatter-max select_and_scatter".split())
# Effects, not values: these rules split nothing.
SPEAKING = {"debug_callback", "debug_print"}


def applications() -> list[tuple[Node, Op]]:
    """Every op of the samples, as an axis of 2 sees it."""
    found = []
    for one in SAMPLES:
        graph = trace(one.fn, one.args, {}).graph
        for node in graph.nodes:
            if node.op == one.name:
                shapes = ([graph.operand(x).shape for x in xs] for xs in (node.inputs, node.outputs))
                found.append((node, op_of(graph, node, *shapes, 2)))
    return found


APPLICATIONS = applications()


def functions(node: Node) -> dict[str, Any]:
    return {k: v for k, v in node.params.items() if core.holds_function(v)}


def test_rules_account_for_every_function() -> None:
    """Of the built-in rules none is silent about a function: what it does not know of runs whole."""
    silent = {
        (node.op, parameter)
        for node, _ in APPLICATIONS
        for parameter in unknown_functions(REGISTRY[node.op], node.params)
    }
    assert silent == set()


def test_functions_that_rules_account_for_are_the_users_in_some_sample() -> None:
    """Else the claims would try the rule with one function only, which it may take for granted."""
    told: dict[str, set[str]] = {}
    for node, _ in APPLICATIONS:
        for v in functions(node).values():
            told.setdefault(node.op, set()).add(repr(v))
    for name, rule in REGISTRY.items():
        if rule.functions and name not in SAID_BY_NAME | SPEAKING:
            assert len(told.get(name, ())) > 1, name


@pytest.mark.parametrize("name", sorted({node.op for node, _ in APPLICATIONS if functions(node)}))
def test_without_an_account_the_op_runs_whole(name: str) -> None:
    careless = replace(REGISTRY[name], functions=())
    for node, op in APPLICATIONS:
        if node.op == name and functions(node):
            assert valid_rows(careless, op) == (all_broadcast(op),)
            assert len(valid_rows(REGISTRY[name], op)) > 1


APPLY = {
    "squares": lambda row: row * row + 1,
    "exponentials": jnp.exp,
    "another square": lambda row: row * jnp.float32(3) - 1,
}


@pytest.mark.parametrize("unique", [True, False])
@pytest.mark.parametrize("name", APPLY)
def test_a_function_of_rows_is_not_taken_for_a_move(name: str, unique: bool) -> None:
    """`x.at[i].apply(f)` computes with the rows: the parts of a sum must be added up before."""

    def model(x: Any, w: Any, i: Any) -> Any:
        return (x @ w).at[i].apply(APPLY[name], unique_indices=unique)

    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((16, 64), (64, 8)))
    i = np.array([3, 0, 12], np.int32)
    for in_sbp in (([S(1)], [S(0)], [B]), ([S(0)], [B], [B]), ([B], [S(1)], [B])):
        program = sbp.compile(model, LINE, in_sbp=in_sbp)
        np.testing.assert_allclose(program(x, w, i), jax.jit(model)(x, w, i), rtol=2e-4, atol=1e-4)


def test_the_plan_says_which_function_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "scatter", replace(REGISTRY["scatter"], functions=()))
    program = sbp.compile(lambda x, i: x.at[i].apply(jnp.exp), LINE, in_sbp=([S(0)], [B]))
    notes = program.plan(np.ones((16, 4), np.float32), np.arange(3)).notes
    (note,) = [n for n in notes if n.startswith("no rule")]
    assert "scatter with a function as update_jaxpr: gathered (test_functions.py:" in note
