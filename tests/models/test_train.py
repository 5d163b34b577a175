"""What the models' commands share."""

import argparse
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from models import mlp, train
from sbp.errors import PlacementError


def options(*given: str, **defaults: float) -> argparse.Namespace:
    parser = train.parser(
        "models.tiny", "tiny", parallel=("data", "zero"), steps=3, batch=4, lr=0.1, **defaults
    )
    return parser.parse_args(given)


def test_defaults_are_those_of_the_model() -> None:
    args = options()
    assert (args.parallel, args.steps, args.batch, args.lr, args.x64) == ("data", 3, 4, 0.1, False)
    assert options("--x64", "--no-check").x64


def test_placement_of_the_command_line() -> None:
    placement = train.prepare(options("--placement", "cpu:2x4"))
    assert (placement.kind, placement.shape) == ("cpu", (2, 4))


def test_a_placement_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(PlacementError, match="cpu:2x4"):
        train.prepare(options("--placement", "cpu:two"))


def test_no_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="--steps 0: at least one"):
        train.prepare(options("--steps", "0"))


def test_gradient_step_descends() -> None:
    optimizer = optax.sgd(0.5)
    step = train.gradient_step(lambda params, batch, key: ((params - batch) ** 2).sum(), optimizer)
    params, _, loss = step(np.float32(3), optimizer.init(np.float32(3)), np.float32(1), jax.random.key(0))
    assert (float(params), float(loss)) == (1.0, 4.0)


def test_difference_is_the_largest() -> None:
    one = {"a": np.array([1.0, 2.0]), "b": np.array([[5.0]])}
    two = {"a": np.array([1.0, 2.5]), "b": np.array([[5.25]])}
    found = train.compare(two, [4.0, 2.0], one, [4.0, 2.5])
    assert (found.losses, found.params) == pytest.approx((0.2, 0.5))


def test_loss_curve_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "loss.svg"
    train._draw({"eight": [2.0, 1.0], "one device": [2.0, 1.0]}, "title", path)
    assert ET.fromstring(path.read_text(encoding="utf-8")).tag == "{http://www.w3.org/2000/svg}svg"


def test_without_matplotlib_there_is_a_word_and_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    train._draw({"eight": [2.0, 1.0]}, "title", tmp_path / "loss.svg")
    assert "matplotlib is missing" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plan, training, comparison and curve, through the command of the smallest model."""
    result = mlp.main(f"--steps 4 --layers 2 --width 16 --batch 16 --parallel data --out {tmp_path}".split())
    assert len(result.losses) == 4
    assert result.params[0]["weight"].shape == (mlp.PIXELS, 16)
    assert result.plan.placement.shape == (2, 4)
    assert result.difference is not None
    assert result.difference.losses < 1e-5
    assert (tmp_path / "loss.svg").exists()
    assert (tmp_path / "plan.html").exists()
    said = capsys.readouterr().out
    assert str(result.plan) in said
    assert f"largest difference to one device: {result.difference}" in said


MLP = "--layers 2 --width 16 --batch 16 --save-every 2".split()


@pytest.mark.full
def test_a_run_goes_on_under_another_placement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The metrics have the whole curve, and the parameters end as on one device."""
    where = ["--out", str(tmp_path), "--checkpoint", str(tmp_path / "runs")]
    first = mlp.main([*MLP, *where, *"--steps 3 --parallel data --no-check".split()])
    assert (first.first, len(first.losses)) == (0, 3)
    with pytest.raises(ValueError, match=r"has step 3 of a run: --resume goes on"):
        mlp.main([*MLP, *where, "--steps", "6"])
    then = mlp.main([*MLP, *where, *"--resume --steps 6 --parallel zero --placement cpu:4".split()])
    assert (then.first, len(then.losses)) == (3, 3)
    assert then.difference is not None
    assert then.difference.losses < 1e-5 and then.difference.params < 1e-5
    rows = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()[1:]]
    assert [float(x) for *_, x in rows] == first.losses + then.losses
    assert "steps 4 to 6: loss" in capsys.readouterr().out
    again = mlp.main([*MLP, *where, "--resume", "--steps", "6"])
    assert again.losses == [] and "nothing to do: the checkpoint is of step 6" in capsys.readouterr().out


@pytest.mark.full
def test_whoever_resumes_saves(tmp_path: Path) -> None:
    """The same command starts a run and goes on with it, as a scheduler runs it once more."""
    for steps in ("2", "4"):
        last = mlp.main([*MLP, "--out", str(tmp_path), "--resume", "--no-check", "--steps", steps])
    assert last.first == 2 and train.checkpoints(options("--out", str(tmp_path), "--resume")).steps == [2, 4]
