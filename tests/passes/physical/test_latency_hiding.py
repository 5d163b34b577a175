"""XLA's latency-hiding scheduler, on made-up ops."""

import random

import pytest

from sbp.passes.physical.latency_hiding import HidingOp, hidden_order, plain_order


def kernel(position: float, *makers: int, seconds: float = 1.0) -> HidingOp:
    return HidingOp(makers, seconds, False, False, position)


def collective(position: float, *makers: int, seconds: float = 1.0) -> HidingOp:
    return HidingOp(makers, seconds, True, False, position)


def begins(ops: list[HidingOp]) -> list[int]:
    return [i for i, is_begin in hidden_order(ops) if is_begin]


@pytest.mark.parametrize("seed", range(20))
def test_everything_runs_once_after_what_it_waits_for(seed: int) -> None:
    draw = random.Random(seed)
    ops = []
    for i in range(40):
        makers = tuple(sorted(draw.sample(range(i), min(i, draw.randrange(3)))))
        sends = draw.random() < 0.3
        loop = not sends and draw.random() < 0.1
        ops.append(HidingOp(makers, draw.choice([0.0, 1.0, 3.0]), sends, loop, draw.random()))
    order = hidden_order(ops)
    began = {i: at for at, (i, is_begin) in enumerate(order) if is_begin}
    ended = {i: at for at, (i, _) in enumerate(order)}
    assert sorted(began) == list(range(40)) and len(order) == 40 + sum(op.sends for op in ops)
    assert all(ended[m] < began[i] for i, op in enumerate(ops) for m in op.makers)
    plain = plain_order(ops)
    assert all(plain.index(m) < plain.index(i) for i, op in enumerate(ops) for m in op.makers)
    # One collective at a time, and no loop that sends something beside it.
    flights = [range(began[i], ended[i]) for i, op in enumerate(ops) if op.sends]
    assert len({at for f in flights for at in f}) == sum(map(len, flights))
    assert not any(began[i] in f for i, op in enumerate(ops) if op.holds_wires for f in flights)


def test_the_chain_of_collectives_comes_first() -> None:
    """Backwards: what waits for nobody runs long before, if something else leads to another collective."""
    ops = [
        collective(0),
        kernel(1, 0),
        collective(2, 1),
        kernel(3, 2),
        kernel(4),
        kernel(5, 3, 4),
    ]
    assert begins(ops) == [0, 1, 2, 4, 3, 5]


@pytest.mark.parametrize("places", [(1, 2), (2, 1)])
def test_the_length_comes_nearest_to_what_is_left(places: tuple[int, int]) -> None:
    short, fits = (kernel(at, seconds=n) for at, n in zip(places, (0.1, 0.9), strict=True))
    ops = [kernel(0), collective(3, 0, seconds=1.0), short, fits, kernel(4, 1, 2, 3)]
    assert begins(ops) == [0, 1, 2, 3, 4]


def test_one_that_waits_for_no_collective_begins_early() -> None:
    ops = [collective(0), kernel(1), kernel(2, 1), kernel(3, 0, 2)]
    assert begins(ops)[0] == 0


def test_who_feeds_a_very_short_kernel_is_not_next() -> None:
    ops = [kernel(2, seconds=1.0), kernel(3, 0, seconds=0.0), kernel(1, seconds=1.0), kernel(4, 1, 2)]
    assert begins(ops) == [0, 2, 1, 3]
