"""Measured steps against their plans; shapes are small, so only relations are tested, no speed."""

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.__main__ import main
from sbp.passes.schedule.actions import Kind
from sbp.passes.schedule.memory import peaks
from sbp.runtime.profile.pipeline import Profile, measured_times
from tests.golden import two_stages
from tests.options import options_of


def compiled(**options: object) -> sbp.Program:
    return sbp.compile(
        two_stages.step,
        two_stages.step_placement,
        in_sbp=two_stages.step_sbp,
        donate_argnums=0,
        options=options_of(**options),
    )


@pytest.fixture(scope="module")
def program() -> sbp.Program:
    return compiled()


@pytest.fixture(scope="module")
def profile(program: sbp.Program) -> Profile:
    return program.profile(*two_stages.values())


@pytest.mark.full
def test_donated_arguments_are_still_there(program: sbp.Program, profile: Profile) -> None:
    args = program.place(*two_stages.values())
    program.profile(*args)
    assert not any(x.is_deleted() for x in jax.tree.leaves(args))
    want = two_stages.step(*two_stages.values())
    got = program(*args)
    assert all(x.is_deleted() for x in jax.tree.leaves(args[0]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


def test_timelines(profile: Profile) -> None:
    plan = profile.plan
    assert plan.stages and plan.schedule is not None and profile.timeline is not None
    done = [[s.action for s in row] for row in profile.timeline.spans]
    assert done == [list(order) for order in plan.schedule.orders]
    for row in profile.timeline.spans:
        assert all(a.end <= b.start for a, b in itertools.pairwise(row))
    ends = {s.action: s.end for row in profile.timeline.spans for s in row}
    for s in profile.timeline.spans[1]:
        if s.action.kind is Kind.F:  # it began once stage 0 had made it
            first = next(
                e
                for a, e in ends.items()
                if (a.stage, a.microbatch, a.kind) == (0, s.action.microbatch, Kind.F)
            )
            assert s.end > first
    assert profile.timeline.start == 0 and 0 <= profile.timeline.bubble_fraction < 1
    assert profile.simulated_timeline is not None and plan.timeline is not None
    assert profile.simulated_timeline.spans == plan.timeline.spans


def test_what_was_held(profile: Profile) -> None:
    plan = profile.plan
    assert plan.stages and plan.schedule is not None and profile.task is not None
    assert profile.live == plan.live == (2, 1)
    # Besides residuals, what has come and is not yet read lies there: at most a tensor per micro-batch.
    estimated = peaks(plan.schedule, profile.task.figures.footprint)
    for held, least in zip(profile.live_bytes, estimated, strict=True):
        assert least <= held <= least + 4 * 8 * 128


def test_times(profile: Profile) -> None:
    found = {(a.kind, a.stage): a for a in profile.actions}
    sent = {(Kind.SEND_F, 0), (Kind.SEND_B, 1)}
    assert set(found) == {(k, s) for k in (Kind.F, Kind.B) for s in (0, 1)} | sent
    assert all(a.alone_seconds > 0 for a in profile.actions)
    assert profile.task is not None and profile.times is not None
    times = profile.task.figures.times
    for s in (0, 1):
        assert found[Kind.F, s].estimated_seconds == times.forward[s]
        assert profile.times.forward[s] == found[Kind.F, s].alone_seconds
        whole = profile.times.input_gradient[s] + profile.times.weight_gradient[s]
        assert whole == pytest.approx(found[Kind.B, s].alone_seconds)
    assert profile.times.input_gradient[0] == 0  # nobody waits for stage 0
    assert profile.times.transfers[0, 1] == found[Kind.SEND_F, 0].alone_seconds
    assert measured_times(profile.task, profile.actions) == profile.times
    assert profile.driver_seconds is not None and profile.driver_seconds > 0


def test_text_and_files(profile: Profile, tmp_path: Path) -> None:
    text = str(profile)
    assert "per step; estimated" in text and "us per action, not waiting" in text
    lines = [line.split() for line in text.split("\n")]
    (at,) = (k for k, cells in enumerate(lines) if cells[:2] == ["action", "stage"])
    assert [cells[:2] for cells in lines[at + 1 : at + 7]] == [
        ["F", "0"],
        ["B", "0"],
        ["F", "1"],
        ["B", "1"],
        ["SF", "0"],
        ["SB", "1"],
    ]
    for suffix in (".html", ".svg", ".trace.json"):
        profile.save(tmp_path / f"profile{suffix}")
    assert "<svg" in profile._repr_html_() and "together" in profile._repr_html_()
    page = (tmp_path / "profile.html").read_text(encoding="utf-8")
    assert "1f1b, measured" in page and "1f1b, estimated" in page and "together" in page
    events = json.loads((tmp_path / "profile.trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {e["pid"] for e in events} == {1, 2, 3} and sum(e["ph"] == "X" for e in events) == 3 * 16
    with pytest.raises(sbp.SbpError, match=r"\.html, \.svg, \.trace\.json"):
        profile.save(tmp_path / "profile.json")


@pytest.mark.full
def test_best_runs(profile: Profile) -> None:
    best = profile.best()
    assert (
        best.name.startswith("auto (") and profile.task is not None and profile.replayed_timeline is not None
    )
    choice = profile.task.search(None, profile.times)
    assert choice.timeline.makespan <= profile.replayed_timeline.makespan
    program = compiled(schedule=best, threads=True)
    args = two_stages.values()
    got = program(*jax.tree.map(jnp.copy, args))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, two_stages.step(*args)
    )
    measured = program.profile(*args)
    assert measured.timeline is not None and measured.plan.name == "step"


def test_one_placement(tmp_path: Path) -> None:
    """Without stages: the whole step."""
    program = sbp.compile(lambda x: x * 2, two_stages.FIRST, donate_argnums=0)
    x = jnp.ones((4, 4))
    profile = program.profile(x)
    assert not x.is_deleted() and profile.step_seconds > 0 and profile.timeline is None
    assert str(profile).split("\n")[1].startswith("measured  ") and "estimated" in str(profile)
    profile.save(tmp_path / "profile.html")
    assert "measured" in (tmp_path / "profile.html").read_text(encoding="utf-8")
    with pytest.raises(sbp.SbpError, match=r"legal +\.html\n"):
        profile.save(tmp_path / "profile.svg")
    with pytest.raises(sbp.SbpError, match="one of a training with stages"):
        profile.best()


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "profile.html"
    assert main(["profile", f"{two_stages.__file__}:step", "--out", str(out)]) == 0
    assert "us per action" in capsys.readouterr().out and out.is_file()
