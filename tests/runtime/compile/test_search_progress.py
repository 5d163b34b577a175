"""What a terminal says while a search takes long; and that nothing else is told."""

import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import sbp
from sbp.__main__ import main
from sbp.runtime.compile import search_progress
from sbp.runtime.compile.search_progress import search_line
from tests.terminals import terminal

X = np.ones((64, 64), np.float32)


def text(seen: list[bytes]) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(seen).decode())


def test_the_line_of_a_long_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_progress, "DELAY_SECONDS", 0.05)
    with terminal(monkeypatch, "stderr") as seen, search_line("planning [f]") as tell:
        assert tell is not None
        time.sleep(0.4)
        tell(np.inf, -np.inf)
        time.sleep(0.4)
        tell(0.002, 0.0015)
        time.sleep(0.4)
    said = text(seen)
    assert "planning [f], 0 s" in said and "2.00 ms a step found, bound 1.50 ms, gap 25 %" in said


def test_a_short_one_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    with terminal(monkeypatch, "stderr") as seen:
        with search_line("planning f") as tell:
            assert tell is not None
        sbp.compile(lambda x: x @ x, sbp.placement("h100", shape=(8,))).plan(X)
    assert text(seen) == "" and threading.active_count() <= before


def test_who_wants_none_and_who_has_no_terminal_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_progress, "DELAY_SECONDS", 0.0)
    with search_line("planning f") as tell:
        assert tell is None
    with terminal(monkeypatch, "stderr") as seen:
        with search_line("planning f", wanted=False) as tell:
            assert tell is None
        quiet = sbp.Options(progress=False)
        sbp.compile(lambda x: x @ x, sbp.placement("h100", shape=(8,)), options=quiet).plan(X)
    assert text(seen) == ""


def test_the_command_line_shows_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(search_progress, "DELAY_SECONDS", 0.0)
    target = Path(__file__).resolve().parents[2] / "golden" / "two_layers.py"
    monkeypatch.chdir(tmp_path)
    with terminal(monkeypatch, "stderr") as seen:
        assert main(["plan", f"{target}:step", "--placement", "h100:2x4", "--out", "plan.html"]) == 0
    said, out = text(seen), capsys.readouterr().out
    assert "planning step, 0 s" in said and "planning step" not in out
    assert "writing plan.html, " in said and "saved plan.html" in out
