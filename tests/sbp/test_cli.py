"""The command line, through `main`: no device of the placement's kind is here."""

import io
import os
import re
import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest

import sbp
from sbp.__main__ import _make_devices, main
from tests.terminals import terminal

FILE = Path(__file__).resolve().parents[1] / "golden" / "two_layers.py"
STEP = f"{FILE}:step"
README = FILE.parents[2] / "README.md"


def run(*argv: object) -> int:
    return main([str(a) for a in argv])


def test_plan_for_absent_hardware(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = [tmp_path / f"plan{suffix}" for suffix in (".json", ".html", ".svg")]
    saved = [x for path in out for x in ("--out", path)]
    assert run("plan", STEP, "--placement", "h100:16x8", *saved) == 0
    text = capsys.readouterr().out
    assert text.startswith("step on h100(data=16 x model=8), planned for h100")
    assert "two_layers.py:12" in text and "all-reduce" in text
    assert all(path.is_file() for path in out)
    assert sbp.load_plan(out[0]).placement.size == 128


def test_args_and_signatures_from_elsewhere(tmp_path: Path) -> None:
    given = "--args", f"{FILE}:small_args", "--in-sbp", f"{FILE}:whole_sbp"
    assert run("plan", STEP, "--placement", "cpu:2x4", *given, "--out", tmp_path / "p.json") == 0
    plan = sbp.load_plan(tmp_path / "p.json")
    assert plan.memory_bytes < 20_000
    assert [str(nd) for nd in plan.in_sbp] == ["(B, B)", "(B, B)", "(S(0), B)"]


def test_signatures_may_be_a_function_of_some_arguments_more(tmp_path: Path) -> None:
    """A file that has `functools.partial(laid, "data")` for its signatures."""
    file, out = tmp_path / "step.py", tmp_path / "p.json"
    file.write_text(
        "from functools import partial\nimport jax\nfrom sbp import B, S\n"
        "def laid(dim, placement):\n    return [S(dim)] + [B] * (placement.ndim - 1),\n"
        "def step(x):\n    return 2 * x\n"
        "step_args = jax.ShapeDtypeStruct((8, 8), 'float32'),\nstep_sbp = partial(laid, 1)\n",
        encoding="utf-8",
    )
    assert run("plan", f"{file}:step", "--placement", "cpu:2x4", "--out", out) == 0
    assert [str(nd) for nd in sbp.load_plan(out).in_sbp] == ["(S(1), B)"]


def test_what_if_a_tensor_lay_otherwise(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tensor, out = "weights['down']", tmp_path / "other.json"
    asked = "--why", tensor, "--what-if", f"{tensor}=[B, B]", "--out", out
    assert run("plan", STEP, "--placement", "h100:2x4", *asked) == 0
    text = capsys.readouterr().out
    assert text.startswith(tensor) and "and everything else planned again" in text
    assert f"what if: {tensor}" in text and "what other does more (+) or less (-) than this" in text
    assert run("check", out) == 0 and "everything adds up" in capsys.readouterr().out


def test_compile_compares_with_the_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = [tmp_path / f"report{suffix}" for suffix in (".json", ".html", ".txt")]
    saved = [x for path in out for x in ("--out", path)]
    hlo = tmp_path / "step.hlo"
    given = "--args", f"{FILE}:small_args", "--donate", "0", "--hlo", hlo
    assert run("compile", STEP, "--placement", "cpu:2x4", *given, *saved) == 0
    text = capsys.readouterr().out
    assert "step on cpu(data=2 x model=4), compiled by XLA for cpu" in text and "unexplained" in text
    assert all(path.is_file() for path in out) and hlo.read_text().startswith("HloModule")


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
        (["plan", f"{FILE}:small_args"], "a program is made of a function"),
        (["plan", STEP, "--donate", "params"], "whole numbers with ',' between them"),
        (["compile", STEP, "--placement", "h100:2x8", "--topology", "2,8"], "whole numbers with 'x' between"),
        (["compile", STEP, "--placement", "h900:2x8"], "kind 'h900'"),
        (["compile", STEP, "--out", "report.pdf"], ".trace.json"),
        (["plan", f"{FILE}:stepp"], "legal  loss, step, step_args, "),
        (["plan", f"{FILE}"], "FILE.py:FUNCTION"),
        (["plan", f"{README}:step"], "a Python file, NAME.py"),
        (["plan", f"{README}"], "FILE.py:FUNCTION"),
        (["plan", f"{FILE.parent}:step"], "a Python file, NAME.py"),
        (["plan", STEP, "--args", f"{README}:args"], "a Python file, NAME.py"),
        (["plan", STEP, "--in-sbp", f"{README}:sbp"], "a Python file, NAME.py"),
        (["explain", f"{README}"], "FILE.py:FUNCTION"),
        (["verify", f"{README}:step"], "a Python file, NAME.py"),
        (["profile", f"{README}:step"], "a Python file, NAME.py"),
        (["diff", f"{README}", f"{README}"], "cannot be read as JSON"),
        (["plan", STEP, "--what-if", "params"], "legal  TENSOR=SIGNATURE"),
        (["plan", STEP, "--what-if", "nothing=[B]"], "nearest: "),
        (["plan", STEP, "--what-if", "weights['down']=[Q]"], "nothing legal starts at 'Q'"),
        (["plan", STEP, "--why", "nothing"], "nearest: "),
        (["plan", STEP, "--search", "8", "--why", "x"], "a search has many plans"),
        (["plan", STEP, "--memory-limit", "80"], "such as '80GB'"),
        (["plan", STEP, "--placement", "h100:8", "--memory-limit", "80kB"], "at most 80.0 kB"),
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
    assert run("plan", STEP, "--placement", "h100:8x1", "--out", b) == 0
    capsys.readouterr()
    assert run("diff", a, a) == 0
    assert "the same collectives" in capsys.readouterr().out
    assert run("diff", a, b) == 0
    text = capsys.readouterr().out
    one, two = sbp.load_plan(a), sbp.load_plan(b)
    change = 100 * (two.wire_bytes - one.wire_bytes) / one.wire_bytes
    assert f"({change:+.1f} %)" in text and "all-reduce" in text


def test_diff_as_a_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(webbrowser, "open", shown.append)
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    assert run("plan", STEP, "--placement", "cpu:2x4", "--out", a) == 0
    assert run("plan", STEP, "--placement", "cpu:2x4", "--in-sbp", f"{FILE}:whole_sbp", "--out", b) == 0
    page = tmp_path / "diff.html"
    assert run("diff", a, b, "--out", page, "--open") == 0
    assert f"saved {page}" in capsys.readouterr().out and shown == [page.as_uri()]
    assert '"diff":{' in page.read_text(encoding="utf-8")
    assert run("diff", a, b, "--out", tmp_path / "diff.svg") == 1
    assert ".html" in capsys.readouterr().err and not (tmp_path / "diff.svg").exists()


def test_a_page_is_shown_without_a_name_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(webbrowser, "open", shown.append)
    assert run("plan", STEP, "--placement", "cpu:8", "--open") == 0
    (uri,) = shown
    assert uri.startswith("file://") and uri.endswith("/step.html")


def test_diff_of_signatures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    assert run("plan", STEP, "--placement", "h100:2x4", "--out", a) == 0
    assert run("plan", STEP, "--placement", "h100:2x4", "--in-sbp", f"{FILE}:whole_sbp", "--out", b) == 0
    capsys.readouterr()
    assert run("diff", a, b) == 0
    text = capsys.readouterr().out
    assert "arguments with other signatures\n  weights['down']  [B, S(0)] -> [B, B]" in text


def test_verify(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", STEP, "--placement", "cpu:2x4", "--args", f"{FILE}:small_args") == 0
    assert "3 results equal one device's" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(["--version"])
    assert (e.value.code, capsys.readouterr().out) == (0, f"sbp {sbp.__version__}\n")


def test_a_terminal_without_letters_for_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    assert run("plan", STEP, "--placement", "h100:2x4") == 0
    assert b"-" * 100 in out.buffer.getvalue() and b"?" not in out.buffer.getvalue()  # type: ignore[attr-defined]
    assert run("plan", f"{FILE}:h\N{LATIN SMALL LETTER E WITH ACUTE}") == 1
    err.flush()
    assert err.buffer.getvalue().startswith(b"error: ")  # type: ignore[attr-defined]
    assert b"'h?'" in err.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.full
def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    env = {**os.environ, "PYTHONPATH": str(FILE.parents[2]), "XDG_CACHE_HOME": str(tmp_path)}
    argv = [sys.executable, "-m", "sbp", "plan", STEP, "--placement", "h100:2x4"]
    done = subprocess.run(argv, stdout=write, stderr=subprocess.PIPE, env=env, check=False)
    os.close(write)
    assert (done.stderr, done.returncode) == (b"", 1)


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, width: int, *argv: object) -> str:
    """What is seen on a terminal of so many columns."""
    with terminal(monkeypatch, "stdout", width) as seen:
        code = run(*argv)
    assert code == 0
    return b"".join(seen).decode().replace("\r\n", "\n")


def columns(line: str) -> int:
    """How many a line takes on a terminal: colours take none."""
    return len(re.sub("\x1b\\[[0-9;]*m", "", line))


@pytest.mark.some(1)
@pytest.mark.parametrize("width", [40, 72, 120])
def test_text_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    text = on_a_terminal(monkeypatch, width, "plan", STEP, "--placement", "h100:2x4")
    assert max(map(columns, text.split("\n"))) <= width and "all-reduce" in text
    text = on_a_terminal(monkeypatch, width, "explain", STEP, "--placement", "h100:2x4", "--at", "all-reduce")
    assert max(map(columns, text.split("\n"))) <= width and "why: " in text


def test_kinds_have_colours_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch, "stdout", 100) as seen:
        assert run("plan", STEP, "--placement", "h100:2x4") == 0
    text = b"".join(seen).decode()
    assert re.search("\x1b\\[[0-9;]+mall-reduce\x1b\\[0m", text)


def test_rows_in_the_order_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    given = "plan", STEP, "--placement", "h100:2x4"
    assert run(*given, "--order", "program", "--rows", 2) == 0
    text = capsys.readouterr().out
    assert "smaller: " in text
    assert run(*given) == 0
    assert capsys.readouterr().out != text


def test_what_does_not_fit_is_red(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "large.py"
    file.write_text(
        "import jax\nfrom jax import lax\n"
        "def f(x):\n    return (lax.cumsum(x) * lax.cummax(x) * lax.cummin(x)).sum()\n"
        "f_args = (jax.ShapeDtypeStruct((10**10,), 'float32'),)\n",
        encoding="utf-8",
    )
    given = "plan", f"{file}:f", "--placement", "h100:1", "--memory-limit", "none"
    text = on_a_terminal(monkeypatch, 120, *given)
    assert "\x1b[1;31mDOES NOT FIT: " in text


def test_a_launch_says_what_is_wrong_with_its_restarts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("launch", "--restarts", -1, "x.py") == 1
    assert run("launch", "--processes", 2, "--min-processes", 3, "x.py") == 1
    said = capsys.readouterr().err
    assert "--restarts -1, --min-processes 2 of 2" in said
    assert "processes from 1 to 2" in said


def test_verify_makes_as_many_devices_as_the_placement_has(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []
    monkeypatch.setattr("sbp.compat.untyped.set_jax", lambda name, count: made.append((name, count)))
    for placement in (
        sbp.placement("cpu", shape=(2, 4)),
        sbp.placement("cpu", [2, 5]),
        sbp.placement("h100", shape=(4,)),
    ):
        _make_devices(placement)
    assert made == [("jax_num_cpu_devices", 8), ("jax_num_cpu_devices", 6)]
