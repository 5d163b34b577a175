"""What a search is kept under, and what is taken instead of a search."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.hardware.catalogue import hardware_for
from sbp.options import ExchangeOptions
from sbp.passes import chain, recall
from sbp.passes.plan.record import ChoiceRecord
from sbp.passes.request import Request
from sbp.passes.search import search
from sbp.rules import Matmul
from tests.passes.questions import asked

LINE = sbp.placement("h100", shape=(8,))
W = np.ones((64, 64), np.float32)
TABLE, IDS = np.ones((64, 8), np.float32), np.arange(16, dtype=np.int32)


@dataclass
class Kept:
    """A store in memory."""

    records: dict[str, ChoiceRecord] = field(default_factory=dict)

    def load(self, key: str) -> ChoiceRecord | None:
        return self.records.get(key)

    def save(self, key: str, record: ChoiceRecord) -> None:
        self.records[key] = record

    def has(self, key: str) -> bool:
        return key in self.records


def step(w: Any, x: Any) -> Any:
    value, slope = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)
    return w - 0.1 * slope, value


def built(fn: Any = step, *args: Any) -> Any:
    """A program as it is planned: its trace and its request."""
    program: Any = sbp.compile(fn, LINE)
    program.plan(*(args or (W, W)))
    (found,) = program._built.values()
    return found


def plan_with(store: Kept, at: Any) -> Any:
    request: Request = at.request
    return chain.compile_plan(at.traced, replace(request, terms=replace(request.terms, store=store)))


def test_what_was_found_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store, at = Kept(), built()
    plan = plan_with(store, at)
    assert len(store.records) == 1

    def no_search(*_: Any, **__: Any) -> Any:
        raise AssertionError("it is known")

    monkeypatch.setattr(search, "solve_indexed", no_search)
    again = plan_with(store, at)
    assert again == plan and again.choice == plan.choice and again.physical == plan.physical


SPOILED: dict[str, Any] = {
    "another program": lambda r: replace(r, program="of something else"),
    "an op less": lambda r: replace(r, ops=r.ops[:-1]),
    "no candidate": lambda r: replace(r, rows=tuple((op, ins, "[P(max)]") for op, ins, _ in r.rows)),
}


@pytest.mark.parametrize("spoiled", SPOILED.values(), ids=SPOILED.keys())
def test_what_does_not_fit_is_searched_for_and_replaced(spoiled: Any) -> None:
    store, at = Kept(), built()
    plan = plan_with(store, at)
    good = dict(store.records)
    store.records = {key: spoiled(record) for key, record in good.items()}
    assert plan_with(store, at) == plan and store.records == good


QUESTIONS: dict[str, Any] = {
    "as it is": lambda: asked(step, LINE, W, W),
    "another function": lambda: asked(lambda w, x: (w - x, (w * x).sum()), LINE, W, W),
    "other shapes": lambda: asked(step, LINE, W, W[:32]),
    "other names": lambda: asked(lambda a, b: step(a, b), LINE, W, W),
    "another hierarchy": lambda: asked(step, sbp.placement("h100", shape=(2, 4)), W, W),
    "other ranks": lambda: asked(step, sbp.placement("h100", ranks=range(8, 16)), W, W),
    "other hardware": lambda: asked(step, LINE, W, W, options=sbp.Options(hardware=hardware_for("a100"))),
    "a limit on memory": lambda: asked(step, LINE, W, W, memory_limit_bytes=1e9),
    "effort": lambda: asked(step, LINE, W, W, effort=2.0),
    "strict": lambda: asked(step, LINE, W, W, strict_nonfinite=True),
    "donated": lambda: asked(step, LINE, W, W, donate=(0,)),
}


def test_all_that_a_search_depends_on_is_in_its_key() -> None:
    keys = [question().key for question in QUESTIONS.values()]
    assert None not in keys and len(set(keys)) == len(keys)
    assert QUESTIONS["as it is"]().key == keys[0]


def test_what_it_does_not_depend_on_is_not() -> None:
    told = asked(step, LINE, W, W, check=False, progress=lambda *_: None, store=Kept())
    assert told.key == QUESTIONS["as it is"]().key


@pytest.fixture
def rule(forgotten: None) -> Iterator[Any]:
    """Registers the rule of an op of the user's, with other claims each time."""
    op = jax.custom_vjp(lambda x, w: x @ w)
    op.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    op.__name__ = "own_product"

    def key(rows: str = "b k, k n -> b n", **claims: Any) -> str | None:
        sbp.register_rule(op, rows, reduced={"k": "sum"}, linear=(0, 1), replace=True, **claims)
        return asked(lambda x, w: jnp.tanh(op(x, w)), LINE, W, W).key

    yield key


def test_rules_of_the_users_are_kept_by_what_they_say(rule: Any) -> None:
    """A function may be written anew, or look at something that has changed."""
    keys = [
        rule(),
        rule("b k, k _ -> b _"),
        rule(matmul=lambda op: Matmul(1, 64, 64, 4096, op.dtypes)),
        rule(traffic=lambda op: 1e9),
        rule(body_bytes=lambda local: 1e6),
    ]
    assert len(set(keys)) == len(keys) and None not in keys
    assert rule() == keys[0]


def test_batches_of_ids_are_told_apart() -> None:
    def looked_up(table: Any, ids: Any) -> Any:
        return jnp.sum(table[ids])

    split = ExchangeOptions()
    found = {
        asked(looked_up, LINE, TABLE, ids, options=sbp.Options(exchange=split)).key
        for ids in (IDS, IDS * 2, IDS * 2)
    }
    assert len(found) == 2


def test_functions_are_not_kept() -> None:
    def called(x: Any) -> Any:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    store = Kept()
    assert asked(called, LINE, W).key is None
    plan_with(store, built(called, W))
    assert not store.records


def test_another_bound_is_kept_with_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found out about a plan when it is written need not be found out again."""
    store, at = Kept(), built()
    monkeypatch.setattr(chain, "relaxed_bound", lambda *_: 0.0)
    answer = search.Search.answer

    def too_sure(*args: Any) -> Any:
        found = answer(*args)
        return replace(found, assignment=replace(found.assignment, bound=2 * found.assignment.seconds))

    monkeypatch.setattr(search.Search, "answer", too_sure)
    plan = plan_with(store, at)
    assert plan.bound == 0.0 and [r.bound for r in store.records.values()] == [0.0]
    assert plan_with(store, at) == plan


def test_the_costs_of_a_plan_are_those_that_it_was_made_for() -> None:
    plan = sbp.compile(step, LINE).plan(W, W)
    slower = sbp.Options(hardware=hardware_for("a100"), plan=plan)
    found = sbp.compile(step, LINE, options=slower).plan(W, W)
    assert plan.bound > 0 and found.bound == 0 and recall.OTHER_COSTS in found.notes
    assert found.choice is not None and plan.choice is not None
    assert (found.choice.ops, found.choice.rows) == (plan.choice.ops, plan.choice.rows)
