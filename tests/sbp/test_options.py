"""`Options` is a value, with its groups."""

import dataclasses

import pytest

import sbp
from sbp.options import ExchangeOptions, PipelineOptions


def test_options_are_values() -> None:
    assert sbp.Options() == sbp.Options(exchange=ExchangeOptions()) and hash(sbp.Options())
    assert "schedule='1f1b'" in repr(sbp.Options(pipeline=PipelineOptions("1f1b")))
    with pytest.raises(dataclasses.FrozenInstanceError):
        sbp.Options().check = True  # type: ignore[misc]
    with pytest.raises(TypeError, match="unexpected keyword argument 'scedule'"):
        sbp.Options(scedule=1)  # type: ignore[call-arg]
