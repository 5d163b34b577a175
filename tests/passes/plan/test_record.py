"""What was chosen, as data and back; and what is no choice for a program."""

import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp import B, S
from sbp.passes.plan.record import ChoiceRecord, NotTaken, chosen_by, read_record, record_data
from sbp.passes.recall import Recall
from sbp.passes.search.search import FoundSignatures
from tests.passes.questions import asked

LINE = sbp.placement("h100", shape=(2, 4))
W = np.ones((64, 64), np.float32)


def step(w: Any, x: Any) -> Any:
    """With a loop, a branch, a value with several uses, and state that comes back."""

    def loss(w: Any) -> Any:
        h = lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w), x)
        h = lax.cond(h.sum() > 0, jnp.sin, jnp.cos, h)
        return jnp.mean(h * h + jax.nn.softmax(h))

    value, slope = jax.value_and_grad(loss)(w)
    return w - 0.1 * slope, value


def question(*args: Any, **options: Any) -> Recall:
    return asked(step, LINE, *(args or (W, W)), **options)


def found() -> tuple[Recall, ChoiceRecord]:
    recall = question()
    return recall, recall.keep(FoundSignatures(recall_choice(recall), ("a remark",)))


def recall_choice(recall: Recall) -> Any:
    from tests.passes.plan.cheapest import choose

    return choose(recall.candidates, recall.boundary, recall.boxings)


def test_a_record_is_read_as_it_was_written() -> None:
    recall, record = found()
    again = read_record(json.loads(json.dumps(record_data(record))))
    assert again == record and again.notes == ("a remark",)
    chosen = chosen_by(again, recall.candidates, recall.boundary)
    assert chosen == recall_choice(recall)
    # Another process has other objects of the same candidates.
    other = question()
    assert chosen_by(again, other.candidates, other.boundary).inputs == record.inputs


WRONG: dict[str, Any] = {
    "an op less": lambda r: replace(r, ops=r.ops[:-1]),
    "rows of other ops": lambda r: replace(r, rows=(r.rows[-1], *r.rows[1:-1], r.rows[0])),
    "a row of no candidate": lambda r: replace(
        r, rows=tuple((op, a, f"{b} [P(max), P(min)]") for op, a, b in r.rows)
    ),
    "an argument that cannot lie so": lambda r: replace(r, inputs=((S(5), B), *r.inputs[1:])),
    "an argument less": lambda r: replace(r, inputs=r.inputs[:-1]),
    "state that comes back otherwise": lambda r: replace(
        r, outputs=((S(1), S(0)) if r.outputs[0] != (S(1), S(0)) else (B, B), *r.outputs[1:])
    ),
    "a loop less": lambda r: replace(r, ports=r.ports[:-1]),
    "a port less": lambda r: replace(r, ports=(*r.ports[:-1], r.ports[-1][:-1])),
    "a share of no value": lambda r: replace(r, shares={10**6: (B, B)}),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_what_does_not_fit_is_not_taken(wrong: Any) -> None:
    recall, record = found()
    with pytest.raises(NotTaken):
        chosen_by(wrong(record), recall.candidates, recall.boundary)


def test_a_row_that_is_not_there_is_no_record() -> None:
    data = record_data(found()[1])
    with pytest.raises(ValueError, match="a row that is not there"):
        read_record(data | {"ops": [10**6]})
