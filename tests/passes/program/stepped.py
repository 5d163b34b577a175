"""Loops and branches on whole values, body by body: what ports are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from sbp.compat import core
from sbp.passes.program.graph import Body, Node

Trip: TypeAlias = tuple[Body, list[Any]]
"""A body that runs, with its inputs; the list is filled with its outputs before the next one is asked for."""


def _step_scan(node: Node, args: list[Any]) -> Iterator[Trip]:
    n_const, n_carry = core.scan_counts(node.params, len(args))
    consts, carry, xs = args[:n_const], args[n_const : n_const + n_carry], args[n_const + n_carry :]
    order = range(node.params["length"])
    for i in reversed(order) if node.params["reverse"] else order:
        inputs = [*consts, *carry, *(x[i] for x in xs)]
        yield node.bodies[0], inputs
        carry = inputs[:n_carry]


def _step_while(node: Node, args: list[Any]) -> Iterator[Trip]:
    test, body = node.bodies
    n_test, n_body = node.params["cond_nconsts"], node.params["body_nconsts"]
    carry = args[n_test + n_body :]
    while True:
        inputs = [*args[:n_test], *carry]
        yield test, inputs
        if not inputs[0]:
            return
        inputs = [*args[n_test : n_test + n_body], *carry]
        yield body, inputs
        carry = inputs


def _step_cond(node: Node, args: list[Any]) -> Iterator[Trip]:
    yield node.bodies[min(max(int(args[0]), 0), len(node.bodies) - 1)], args[1:]


STEPS: Mapping[str, Callable[[Node, list[Any]], Iterator[Trip]]] = {
    "scan": _step_scan,
    "while": _step_while,
    "cond": _step_cond,
}
