"""`Options`: its groups, and the names that options had before."""

import dataclasses

import pytest

import sbp
from sbp.options import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_option_of_before_works_and_warns(old: str) -> None:
    group, new = MOVED[old]
    with pytest.warns(DeprecationWarning, match=rf"Options\({old}=...\) is Options\({group}=") as caught:
        options = sbp.Options(**{old: 3})
    assert caught[0].filename == __file__
    assert getattr(getattr(options, group), new) == 3
    assert dataclasses.replace(options, time_limit=1.0).time_limit == 1.0
    assert getattr(getattr(dataclasses.replace(options, check=True), group), new) == 3


def test_old_and_new_names_meet() -> None:
    given = sbp.PipelineOptions(schedule="gpipe")
    with pytest.warns(DeprecationWarning):
        assert sbp.Options(stages=2, pipeline=given).pipeline == sbp.PipelineOptions("gpipe", 2)


@pytest.mark.parametrize(
    ("name", "meant"), [("scedule", "pipeline.schedule"), ("memory_limt", "memory_limit"), ("xyz", "")]
)
def test_a_typo_says_what_may_be_meant(name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"did you mean {meant}" if meant else "unexpected"):
        sbp.Options(**{name: 1})  # type: ignore[arg-type]


def test_options_are_values() -> None:
    assert sbp.Options() == sbp.Options(exchange=sbp.ExchangeOptions()) and hash(sbp.Options())
    assert "schedule='1f1b'" in repr(sbp.Options(pipeline=sbp.PipelineOptions("1f1b")))
    with pytest.raises(dataclasses.FrozenInstanceError):
        sbp.Options().check = True  # type: ignore[misc]
