"""Every model of the gallery can be planned by the command that its page shows."""

import re
import shlex
from pathlib import Path

import pytest

from sbp.__main__ import main
from sbp.commandline.user_file import EXAMPLE
from tests.runtime.target.plugin import needs_plugin

ROOT = Path(__file__).resolve().parents[2]
COMMAND = re.compile(r"python -m (sbp \w+ models/[^\n`]*)")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "models").glob("*.py"))]
SAYS = {
    "plan": ("at the peak per device", "results at rest"),
    "search": ("hierarchies planned", "what it does"),
    "compile": ("sent per device", "unexplained"),
}
COMMANDS = sorted({m[1] for page in PAGES for m in COMMAND.finditer(page.read_text(encoding="utf-8"))})


def test_every_model_has_such_a_command() -> None:
    gallery = {
        p.name for p in (ROOT / "models").glob("*.py") if "\ndef main(" in p.read_text(encoding="utf-8")
    }
    for name in gallery:
        page = (ROOT / "models" / name).read_text(encoding="utf-8")
        assert f"python -m sbp plan models/{name}:train_step" in page.split('"""')[1], name
    assert gallery >= {
        "gpt.py",
        "mlp.py",
        "classifier.py",
        "resnet.py",
        "dlrm.py",
        "dcn.py",
        "deepfm.py",
        "two_tower.py",
    }


@pytest.mark.some("sbp plan models/dcn.py:train_step --placement h100:8")
@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=[needs_plugin] if "sbp compile" in c else []) for c in COMMANDS]
)
def test_the_command_plans_it(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").symlink_to(ROOT / "models")
    search = "--search" in command
    # One axis: the hierarchies of 1,024 devices take a minute.
    assert main(shlex.split(command)[1:] + ["--axes", "1"] * search) == 0
    captured = capsys.readouterr()
    says = SAYS["search" if search else command.split()[1]]
    assert all(words in captured.out for words in says) and not captured.err


@pytest.mark.full
def test_the_tool_s_own_hint_works(capsys: pytest.CaptureFixture[str]) -> None:
    target = re.search(r"\S+\.py:\w+", EXAMPLE)
    assert target is not None
    file, name = target[0].split(":")
    assert main(["plan", f"{ROOT / file}:{name}", "--placement", "h100:2"]) == 0
    assert "results at rest" in capsys.readouterr().out
