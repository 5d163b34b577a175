"""A chain of passes."""

import gc

import pytest

from sbp.passes.pass_manager import chain_of, collector_paused


def test_the_collector_is_off_while_passes_run_and_on_again() -> None:
    chain = chain_of("look", lambda _: gc.isenabled(), lambda _: None).then(
        "keep", lambda on: (on, gc.isenabled()), lambda _: None
    )
    assert gc.isenabled()
    assert chain.run(None) == (False, False)
    assert gc.isenabled()


def test_it_is_on_again_after_an_error_and_stays_off_if_it_was() -> None:
    with pytest.raises(ValueError, match="no"), collector_paused():
        raise ValueError("no")
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
