"""What a program says in the log."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import sbp


def test_what_was_done_and_why_again(caplog: pytest.LogCaptureFixture) -> None:
    double = sbp.compile(lambda batch, k: batch * k, sbp.placement("cpu", shape=(8,)), static_argnums=1)
    with caplog.at_level(logging.INFO, logger="sbp"):
        double(np.ones((16, 64), np.float32), 2)
        double(np.ones((16, 64), np.float32), 2)
        double(np.ones((13, 64), np.float32), 2)
        double(np.ones((13, 64), np.float32), 3)
        double({"x": 1.0}["x"], 3)
    said = [r.getMessage() for r in caplog.records]
    assert [s.split(":")[1].split(" in ")[0].strip() for s in said] == [
        "traced",
        "planned",
        "compiled and run once",
    ] * 4
    assert said[0].startswith("<lambda>: traced in ") and "again" not in said[0]
    assert "planned in" in said[1] and said[1].endswith(" s for cpu(x=8)")
    assert said[3].endswith(", again: batch is float32[13, 64], was float32[16, 64]")
    assert said[6].endswith(", again: static arguments or settings of JAX are others")
    assert said[9].endswith(", again: batch is float32[] (a Python number), was float32[13, 64]")


def test_nothing_is_said_unasked(caplog: pytest.LogCaptureFixture) -> None:
    sbp.compile(lambda x: x + 1, sbp.placement("cpu", shape=(8,)))(np.ones(8, np.float32))
    assert not [r for r in caplog.records if r.name == "sbp" and r.levelno >= logging.WARNING]
