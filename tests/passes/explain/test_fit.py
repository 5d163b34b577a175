"""A plan that is too large for its device is refused; one that is asked for all the same says so."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import sbp
from sbp import B, S
from sbp.errors import ArgumentError, MemoryLimitError
from sbp.hardware.catalogue import BYTES_ONLY, CATALOGUE
from sbp.options import UNITS, PipelineOptions, bytes_of
from sbp.passes.render.diff import diff_text
from tests.golden import two_stages
from tests.options import options_of

GB = 10**9
CHIPS = sorted(name for name in CATALOGUE if name != "cpu")


def floats(size: float) -> jax.ShapeDtypeStruct:
    """As many bytes of float32."""
    return jax.ShapeDtypeStruct((int(size) // 4,), jnp.float32)


def waves(x: Any) -> Any:
    """Five times its argument lives at its peak, and a number is its result."""
    # Each of these is written to memory, as no element-wise op would be.
    a, b, c, d = lax.cumsum(x), lax.cummax(x), lax.cummin(x), lax.cumlogsumexp(x)
    return (a * b * c * d).sum()


def planned(
    fn: Any, *args: Any, kind: str = "h100", devices: int = 1, donate: Any = (), **options: Any
) -> Any:
    on = sbp.placement(kind, shape=(devices,))
    given = options_of(**options)
    return sbp.compile(fn, on, in_sbp=[B], donate_argnums=donate, options=given).plan(*args)


@pytest.fixture(scope="module")
def large() -> sbp.Plan:
    plan: sbp.Plan = planned(waves, floats(30 * GB), memory_limit=math.inf)
    return plan


def test_what_does_not_fit_is_refused_with_the_smallest_peak() -> None:
    with pytest.raises(MemoryLimitError) as caught:
        planned(waves, floats(30 * GB))
    (problem,) = caught.value.problems
    assert problem.where == "waves on h100(x=1)"
    assert problem.got.endswith(" per device at the peak")
    assert problem.legal == "at most 80.0 GB, which h100 has"
    said = r"the smallest peak that was found is [\d.]+ GB, and none below [\d.]+ GB by"
    assert re.match(said, problem.why)
    assert "alive there: " in problem.why and "x [B] 30.0 GB" in problem.why
    assert problem.fix.endswith("Options(memory_limit=math.inf) to see the fastest plan of any size")


def test_it_does_not_fit_in_the_first_lines(large: sbp.Plan) -> None:
    assert large.memory_bytes > 80 * GB and not large.fits
    text = str(large)
    first, second, *_ = text.split("\n")
    assert first == "waves on h100(x=1), planned for h100"
    said = r"DOES NOT FIT: \d+ GB at the peak per device by the estimate, and h100 has 80.0 GB"
    assert re.fullmatch(said, second)
    assert "plan         does not fit its device; proven optimal among plans of any size" in text
    note = large.notes[0]
    assert note.startswith("it does not fit: alive at the peak are ")
    assert "x [B] 30.0 GB" in note and "try: " in note


def test_it_does_not_fit_in_every_other_form(large: sbp.Plan, tmp_path: Path) -> None:
    for suffix in (".html", ".svg", ".json"):
        large.save(tmp_path / f"plan{suffix}")
    assert '"misfit":"DOES NOT FIT: ' in (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert ".alarm { color: #b42318;" in large._repr_html_()
    assert '<p class="alarm">DOES NOT FIT: ' in large._repr_html_()
    assert "does not fit" in (tmp_path / "plan.svg").read_text(encoding="utf-8")
    again = sbp.load_plan(tmp_path / "plan.json")
    assert str(again).split("\n")[:2] == str(large).split("\n")[:2]
    for form in (repr(large), diff_text(large, again)):
        assert "does not fit" in form


def test_nothing_says_proven_optimal_alone(large: sbp.Plan, tmp_path: Path) -> None:
    large.save(tmp_path / "plan.html")
    for form in (str(large), repr(large), large._repr_html_(), (tmp_path / "plan.html").read_text("utf-8")):
        assert form.count("proven optimal") == form.count("proven optimal among plans of any size") > 0


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", CHIPS)
def test_every_chip_of_the_catalogue_has_an_end(kind: str) -> None:
    has = CATALOGUE[kind].memory_bytes
    assert math.isfinite(has)
    assert planned(waves, floats(has / 8), kind=kind).fits
    assert "DOES NOT FIT" in str(planned(waves, floats(has / 2), kind=kind, memory_limit=math.inf))
    with pytest.raises(MemoryLimitError):
        planned(waves, floats(has / 2), kind=kind)


@pytest.mark.parametrize("fn", [waves, jnp.sin])
def test_a_cpu_has_no_limit_of_its_own(fn: Any) -> None:
    plan = planned(fn, floats(300 * GB), kind="cpu")
    assert plan.fits and "FIT" not in str(plan) and "at the peak per device\n" in str(plan)


def test_json_is_json_where_nothing_is_the_limit(tmp_path: Path) -> None:
    """A figure without a bound is no number that other readers of JSON would refuse."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    for hardware in (None, BYTES_ONLY):
        plan = planned(waves, floats(400), kind="cpu", hardware=hardware)
        assert "at the peak" in str(plan)
        plan.save(tmp_path / "plan.json")
        json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"), parse_constant=refuse)
        assert sbp.load_plan(tmp_path / "plan.json").hardware == plan.hardware


def test_a_pipeline_that_does_not_fit() -> None:
    small = replace(CATALOGUE["h100"], name="small", memory_bytes=15_000.0)
    plans = [
        sbp.compile(
            two_stages.step,
            two_stages.step_placement,
            in_sbp=two_stages.step_sbp,
            options=sbp.Options(hardware=hardware, pipeline=PipelineOptions(schedule="gpipe")),
        ).plan(*two_stages.step_args())
        for hardware in (CATALOGUE["h100"], small)
    ]
    fitting, plan = plans
    assert fitting.fits and "FIT" not in str(fitting) and fitting.memory_bytes > 15_000
    assert str(plan).split("\n")[1].startswith("DOES NOT FIT: ") and not plan.fits
    assert '<p class="alarm">DOES NOT FIT: ' in plan._repr_html_() and "does not fit" in repr(plan)
    assert "does not fit its device; " in str(plan) and plan.notes[0].startswith("it does not fit; try: ")
    tiny = replace(small, memory_bytes=3_000.0)
    with pytest.raises(MemoryLimitError, match="only for arguments and results"):
        sbp.compile(two_stages.step, two_stages.step_placement, options=sbp.Options(hardware=tiny)).plan(
            *two_stages.step_args()
        )


def twice(state: Any, x: Any) -> Any:
    return state * 2, x.sum()


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(MemoryLimitError) as caught:
        planned(twice, floats(50 * GB), floats(40 * GB))
    (problem,) = caught.value.problems
    assert problem.where == "twice on h100(x=1)"
    assert problem.got == "140 GB per device only for arguments and results"
    assert problem.legal == "at most 80.0 GB, which h100 has"
    assert problem.why.startswith("at rest: state [B] 50.0 GB, result[0] [B] 50.0 GB, x [B] 40.0 GB")
    assert problem.fix.startswith(
        "donate_argnums for state that comes back; split tensors that are whole on every"
    )
    assert problem.fix.endswith("Options(memory_limit=...) if a device has more")


def test_what_is_donated_is_there_once() -> None:
    args = floats(50 * GB), floats(4 * GB)
    with pytest.raises(MemoryLimitError, match="104 GB per device"):
        planned(twice, *args)
    assert planned(twice, *args, donate=0).memory_bytes == pytest.approx(54 * GB)
    # Another donated argument has no memory to give to this result.
    with pytest.raises(MemoryLimitError):
        planned(twice, *args, donate=1)


def test_arrays_that_are_closed_over_are_at_rest_too() -> None:
    closed = jnp.ones(1000)
    small = replace(CATALOGUE["h100"], memory_bytes=4_900.0)
    with pytest.raises(MemoryLimitError, match=r"5.00 kB per device only for arguments and results"):
        planned(lambda x: (x.sum() + closed).sum(), jnp.ones(250), hardware=small)


def test_nothing_is_searched_for_what_can_never_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """AUTO splits over all devices at the most; a limit that is given is told so too."""
    monkeypatch.setattr("sbp.passes.chain.Search", None)
    on, args = sbp.placement("h100", shape=(2, 2)), (floats(400 * GB), floats(4 * GB))
    for options, at_most in ((sbp.Options(), "80.0 GB"), (sbp.Options(memory_limit="90GB"), "90.0 GB")):
        with pytest.raises(
            MemoryLimitError, match=f"201 GB per device only for .*\n  legal  at most {at_most}"
        ):
            sbp.compile(twice, on, options=options).plan(*args)


def test_a_split_that_fits_is_not_refused() -> None:
    on = sbp.placement("h100", shape=(4,))
    args = floats(100 * GB), floats(4 * GB)
    assert sbp.compile(twice, on, in_sbp=[S(0)], donate_argnums=0).plan(*args).fits
    with pytest.raises(MemoryLimitError):
        sbp.compile(twice, on, in_sbp=[B], donate_argnums=0).plan(*args)


def test_a_limit_that_is_given_counts_instead() -> None:
    args = floats(50 * GB), floats(40 * GB)
    assert not planned(twice, *args, memory_limit="200GB").fits
    with pytest.raises(MemoryLimitError, match=r"at most 20.0 GB"):
        planned(waves, floats(10 * GB), memory_limit="20 GB")


@pytest.mark.parametrize("unit", UNITS)
def test_units(unit: str) -> None:
    prefix, binary = unit[0], "i" in unit
    power = "BKMGTP".index(prefix.upper())
    size = 1.5 * (1024 if binary else 1000) ** power
    assert bytes_of(f"1.5{unit}", "") == bytes_of(f" 1.5  {unit} ", "") == size


@pytest.mark.parametrize("limit", [None, 1, 16e9, math.inf])
def test_numbers_are_bytes(limit: Any) -> None:
    assert sbp.Options(memory_limit=limit).memory_limit_bytes == limit


WRONG = ["80", "80gb", "80 G", "8o GB", "GB", "", "-1GB", "0GB", "80Gb", "1e9", "80GB per device", "inf"]


@pytest.mark.parametrize("limit", [*WRONG, 0, -1, math.nan, True, b"80GB", [80]], ids=repr)
def test_another_limit_is_refused_at_once(limit: Any) -> None:
    table = sbp.embedding.TableConfig("day", 64, 8)
    features, tx = [sbp.embedding.FeatureConfig("day", table, (None,))], sbp.rows(optax.sgd(0.1))
    on = sbp.placement("h100", shape=(8,))
    calls: list[Any] = [
        lambda: sbp.Options(memory_limit=limit),
        lambda: replace(sbp.Options(), memory_limit=limit),
        lambda: sbp.embedding.choose(features, 8, on, optimizer=tx, memory_limit=limit),
    ]
    for call in calls:
        with pytest.raises(ArgumentError, match="legal  bytes, or a text such as '80GB' or '80GiB'"):
            call()
