"""The command line, through `main`: no device of the placement's kind is here."""

from pathlib import Path

import pytest

import sbp
from sbp.__main__ import main

FILE = Path(__file__).resolve().parents[1] / "golden" / "two_layers.py"
STEP = f"{FILE}:step"


def run(*argv: object) -> int:
    return main([str(a) for a in argv])


def test_plan_for_absent_hardware(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = [tmp_path / f"plan{suffix}" for suffix in (".json", ".html", ".svg")]
    saved = [x for path in out for x in ("--out", path)]
    assert run("plan", STEP, "--placement", "h100:16x8", *saved) == 0
    text = capsys.readouterr().out
    assert text.startswith("step on h100(data=16 x model=8), planned for h100")
    assert "of weights['up']" in text and "all-reduce" in text
    assert all(path.is_file() for path in out)
    assert sbp.load_plan(out[0]).placement.size == 128


def test_args_and_signatures_from_elsewhere(tmp_path: Path) -> None:
    given = "--args", f"{FILE}:small_args", "--in-sbp", f"{FILE}:whole_sbp"
    assert run("plan", STEP, "--placement", "cpu:2x4", *given, "--out", tmp_path / "p.json") == 0
    plan = sbp.load_plan(tmp_path / "p.json")
    assert plan.memory_bytes < 20_000
    assert [str(nd) for nd in plan.in_sbp] == ["(B, B)", "(B, B)", "(S(0), B)"]


def test_typo_in_a_signature(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", STEP, "--placement", "cpu:2x4", "--in-sbp", f"{FILE}:wrong_sbp") == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    assert "S(7)" in captured.err and "legal" in captured.err and "weights['down']" in captured.err


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["plan", f"{FILE}:lonely"], "def lonely_args():"),
        (["plan", f"{FILE}:stepp"], "has no 'stepp'"),
        (["plan", f"{FILE}"], "FILE.py:FUNCTION"),
        (["plan", "nowhere.py:step"], "'nowhere.py'"),
        (["plan", STEP, "--placement", "h1000:8"], "kind 'h1000'"),
        (["plan", STEP, "--placement", "cpu:2by4"], "KIND:AxBxC"),
        (["plan", STEP, "--out", "plan.pdf"], "'.pdf'"),
        (["plan", STEP, "--out", "no/such/folder/plan.json"], "no/such/folder/plan.json"),
        (["explain", STEP, "--placement", "h100:2x4", "--at", "two_layers.py:999"], "two_layers.py:999"),
        (["diff", "a.json", "b.json"], "a.json"),
    ],
)
def test_problems_are_told_plainly(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    argv: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and complaint in err and "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("argv", [[], ["paln"], ["plan"], ["plan", STEP, "--placment", "cpu:8"]])
def test_wrong_usage(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(argv)
    assert e.value.code == 2 and "usage" in capsys.readouterr().err


def test_explain_lists_alternatives(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", STEP, "--placement", "h100:2x4", "--at", "all-reduce") == 0
    text = capsys.readouterr().out
    assert "why: " in text and "with all else as it is, instead:" in text
    # Planned to the proven optimum: no single op can do better on its own.
    assert "\n    +" in text and "\n    -" not in text


def test_explain_inside_a_loop(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", f"{FILE}:repeat", "--placement", "h100:4", "--at", "dot_general") == 0
    text = capsys.readouterr().out
    assert "which is split over 'x' as weights['down'] is" in text and "6 times per step" in text
    assert "\n    +" in text and "\n    -" not in text


def test_explain_a_saved_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("plan", STEP, "--placement", "h100:2x4", "--out", tmp_path / "p.json") == 0
    capsys.readouterr()
    assert run("explain", tmp_path / "p.json") == 0
    text = capsys.readouterr().out
    assert "why: " in text and "% of the step" in text and "knows no alternatives" in text


def test_diff(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    assert run("plan", STEP, "--placement", "h100:2x4", "--out", a) == 0
    assert run("plan", STEP, "--placement", "h100:2x2", "--out", b) == 0
    capsys.readouterr()
    assert run("diff", a, a) == 0
    assert "the same collectives" in capsys.readouterr().out
    assert run("diff", a, b) == 0
    text = capsys.readouterr().out
    one, two = sbp.load_plan(a), sbp.load_plan(b)
    change = 100 * (two.wire_bytes - one.wire_bytes) / one.wire_bytes
    assert f"({change:+.1f} %)" in text and "all-reduce" in text


def test_diff_of_signatures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    assert run("plan", STEP, "--placement", "h100:2x4", "--out", a) == 0
    assert run("plan", STEP, "--placement", "h100:2x4", "--in-sbp", f"{FILE}:whole_sbp", "--out", b) == 0
    capsys.readouterr()
    assert run("diff", a, b) == 0
    text = capsys.readouterr().out
    assert "arguments that lie otherwise\n  weights['down']  [B, S(0)] -> [B, B]" in text


def test_verify(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", STEP, "--placement", "cpu:2x4", "--args", f"{FILE}:small_args") == 0
    assert "3 results equal one device's" in capsys.readouterr().out
