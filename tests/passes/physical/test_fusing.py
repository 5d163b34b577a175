"""What each op is to fusion: every rule says it, or the table does."""

import pytest

from sbp.communication.protocol import COLLECTIVES
from sbp.passes.physical.fusing import COSTLY, IN_PLACE, KINDS, MOVES, PARTIAL, Fusing
from sbp.rules import REGISTRY


@pytest.mark.parametrize("name", sorted({*KINDS, *PARTIAL, *COSTLY, *IN_PLACE}))
def test_the_tables_are_of_ops_that_there_are(name: str) -> None:
    assert name in REGISTRY


def test_a_rule_that_says_it_is_element_wise_has_no_entry() -> None:
    """So that both cannot say something else; a slice in place of an element is what the table adds."""
    said = {n for n in KINDS if REGISTRY[n].pointwise or REGISTRY[n].identity}
    assert not said


def test_collectives_are_calls() -> None:
    assert not set(MOVES) & set(COLLECTIVES)
    assert set(MOVES.values()) == {Fusing.VIEW, Fusing.LOOP}
