"""A fixed sample of JAX's harnesses on eight devices, and whether the suite itself finds what is wrong.

All of them: `python -m tests.conformance --resume results.jsonl --report report.md`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbp.rules.registry import REGISTRY
from sbp.signature import B
from tests.conformance import report
from tests.conformance.__main__ import choose
from tests.conformance.compare import CHECKS, difference, mismatch
from tests.conformance.harnesses import (
    FAILED,
    NOTHING,
    PASSED,
    UNSUPPORTED,
    WHOLE,
    Case,
    Result,
    all_cases,
    arguments,
    draw,
    run_case,
    spread_cases,
)
from tests.conformance.worker import Worker

SAMPLE, QUICK = 600, 150


def parameters() -> Iterator[Any]:
    """The sample; all but its first cases, which are of every group, are slow."""
    for i, case in enumerate(spread_cases(SAMPLE)):
        yield pytest.param(case, id=case.name, marks=[pytest.mark.slow] if i >= QUICK else [])


@pytest.mark.some(24)
@pytest.mark.parametrize("case", list(parameters()))
def test_results_are_those_of_one_device(case: Case) -> None:
    result = run_case(case)
    assert result.status in (PASSED, WHOLE, NOTHING), result


def test_the_sample_has_every_group() -> None:
    groups = {case.group for case in all_cases() if case.supported}
    assert {case.group for case in spread_cases(QUICK)} == groups
    assert len(all_cases()) > 5000 and len({case.name for case in all_cases()}) == len(all_cases())


def named(start: str) -> Case:
    """The first case whose name starts so."""
    return next(case for case in all_cases() if case.name.startswith(start))


def test_draws_are_legal_repeatable_and_split_something() -> None:
    case = named("pow_broadcast")
    args = arguments(case)
    drawn = [draw(case, args, attempt) for attempt in range(20)]
    assert drawn == [draw(case, args, attempt) for attempt in range(20)]
    assert {d.hierarchy for d in drawn} == {(8,), (2, 4), (2, 2, 2)}
    assert len({d.hardware.name for d in drawn}) == 2
    for d in drawn:
        assert all(len(nd) == len(d.hierarchy) for nd in d.in_sbp)
        assert any(set(nd) != {B} for nd in d.in_sbp)
    again = arguments(case)
    assert all(map(np.array_equal, args, again))


def test_a_wrong_op_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    case = named("tanh_shape_float32")
    assert run_case(case).status == PASSED
    wrong = replace(REGISTRY["tanh"], body=lambda ctx, x: [jnp.tanh(x) * 1.0001])
    monkeypatch.setitem(REGISTRY, "tanh", wrong)
    result = run_case(case)
    assert result.status == FAILED and result.message.startswith("mismatch: result 0: 400 of 400 elements")
    assert result.split == ("tanh",)


def test_an_error_fails_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(ctx: Any, x: Any) -> Any:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setitem(REGISTRY, "tanh", replace(REGISTRY["tanh"], body=broken))
    result = run_case(named("tanh_shape_float32"))
    assert result.status == FAILED
    assert result.message.startswith("run: ZeroDivisionError: on purpose at runtime/lower/local_kernels.py:")


def test_what_jax_cannot_run_is_told_apart() -> None:
    assert run_case(named("clamp_dtypes_min_bool")).status == UNSUPPORTED


def test_differences() -> None:
    one = np.array([1.0, np.nan, np.inf, 0.0], np.float32)
    assert not difference(one, one)
    assert not difference(one * np.float32(1 + 1e-6), one)
    assert difference(one * np.float32(1 + 1e-5), one)
    assert difference(np.array([1.0, 0.0, np.inf, 0.0], np.float32), one)
    assert difference(np.array([1.0, np.nan, -np.inf, 0.0], np.float32), one)
    assert "at [3]" in difference(np.array([1.0, np.nan, np.inf, 1e-30], np.float32), one)
    assert difference(np.array([1, 2]), np.array([1, 3])).startswith("1 of 2 elements differ")
    # What a sum may be off by depends on its largest element.
    assert not difference(np.array([100.0, 1e-5], np.float32), np.array([100.0, 0.0], np.float32), True)


def test_structure_is_compared() -> None:
    x = np.ones(3, np.float32)
    assert mismatch("add", {}, [], [x, x], [x]) == "2 results, not 1"
    assert mismatch("add", {}, [], [x], [x[:2]]) == "result 0 is float32[3], not float32[2]"
    assert mismatch("add", {}, [], [x], [x.astype(int)]) == "result 0 is float32[3], not int64[3]"
    assert not mismatch("add", {}, [], [x], [x])


MATRIX = np.random.default_rng(0).normal(size=(2, 4, 4))
SYMMETRIC = MATRIX + np.swapaxes(MATRIX, -1, -2)
POSITIVE = MATRIX @ np.swapaxes(MATRIX, -1, -2)
FLIP = np.array([1.0, -1.0, 1.0, -1.0])


def factors(group: str) -> tuple[dict[str, Any], np.ndarray[Any, Any], list[Any], list[Any]]:
    """Params, operand, NumPy's or JAX's factors, and others that are as good."""
    if group == "svd":
        u, s, vh = np.linalg.svd(MATRIX)
        return {"compute_uv": True}, MATRIX, [s, u, vh], [s, u * FLIP, vh * FLIP[:, None]]
    if group == "eigh":
        w, v = np.linalg.eigh(SYMMETRIC)
        return {}, SYMMETRIC, [v, w], [v * FLIP, w]
    if group == "eig":
        w, v = np.linalg.eig(MATRIX)
        params = {"compute_left_eigenvectors": False, "compute_right_eigenvectors": True}
        return params, MATRIX, [w, v], [w[..., ::-1], v[..., ::-1] * 1j]
    if group == "qr":
        q, r = np.linalg.qr(MATRIX)
        return {}, MATRIX, [q, r], [q * FLIP, r * FLIP[:, None]]
    if group == "cholesky":
        lower = np.linalg.cholesky(POSITIVE)
        return {}, POSITIVE, [lower], [lower + np.triu(np.ones((4, 4)), 1)]
    with jax.enable_x64(True):
        found = list(map(np.asarray, jax.lax.linalg.lu(MATRIX)))
    return {}, MATRIX, found, found


@pytest.mark.parametrize("group", ["svd", "eigh", "eig", "qr", "cholesky", "lu"])
def test_factors_are_compared_by_what_defines_them(group: str) -> None:
    params, operand, want, other = factors(group)
    assert not mismatch(group, params, [operand], want, want)
    assert not mismatch(group, params, [operand], other, want)
    for i in range(len(want)):
        wrong = [np.roll(x, 1, axis=-1) if i == j else x for j, x in enumerate(want)]
        if group == "eig" and i == 0:
            wrong[0] = want[0] * 1.01
        assert mismatch(group, params, [operand], wrong, want), f"factor {i}"


def test_ties_may_come_in_any_order_but_together() -> None:
    keys, x, y = np.array([0, 0, 1]), np.array([5, 6, 7]), np.array([1.0, 2.0, 3.0])
    params = {"is_stable": False, "num_keys": 1, "dimension": 0}
    swap = np.array([1, 0, 2])
    assert not mismatch("sort", params, [], [keys, x[swap], y[swap]], [keys, x, y])
    assert mismatch("sort", params, [], [keys, x[swap], y], [keys, x, y])
    assert mismatch("sort", {**params, "is_stable": True}, [], [keys, x[swap], y[swap]], [keys, x, y])
    operand, want = np.array([3.0, 9.0, 9.0, 1.0]), [np.array([9.0, 9.0]), np.array([1, 2])]
    assert not mismatch("approx_top_k", {}, [operand], [want[0], want[1][::-1]], want)
    assert mismatch("approx_top_k", {}, [operand], [want[0], np.array([1, 1])], want)
    assert mismatch("approx_top_k", {}, [operand], [want[0], np.array([0, 2])], want)
    assert set(CHECKS) >= {"sort", "approx_top_k"}


def test_what_a_sum_starts_with_may_count_more_than_once() -> None:
    params = {"init_value": 3, "dimensions": (0,)}
    operand, want = np.arange(8).reshape(4, 2), np.array([15, 19])
    for times in (-1, 0, 3):
        assert not mismatch("reduce", params, [operand], [want + 3 * times], [want])
    for wrong in (want + 1, want + 12, want + np.array([0, 3])):
        assert "not by a multiple of 3" in mismatch("reduce", params, [operand], [wrong], [want])


def crash_or_hang(case: Case) -> Result:
    """What a worker must survive."""
    if case.group == "cos":
        os.abort()
    if case.group == "sin":
        time.sleep(600)
    return Result(case.name, case.group, PASSED)


@pytest.mark.slow
def test_a_crash_and_a_hang_cost_one_case_each() -> None:
    worker = Worker(5.0, crash_or_hang)
    try:
        found = [worker.take(named(f"{group}_shape")) for group in ("tan", "cos", "sin", "tan")]
    finally:
        worker.close()
    assert [r.status for r in found] == [PASSED, FAILED, FAILED, PASSED]
    assert found[1].message.startswith("crash: the process ended with -6: Fatal Python error: Aborted")
    assert found[2].message == "hang: no result within 5 s"


def test_results_survive_the_file_and_the_report_names_failures(tmp_path: Path) -> None:
    good = Result("add_1", "add", PASSED, 1, (2, 4), "staying", ("[S(0), B]",), ("add",), ("sort",), 0.5)
    bad = replace(good, name="add_2", status=FAILED, message="mismatch: 1 of 2\nelements differ")
    whole = Result("lu_1", "lu", WHOLE, whole=("lu",))
    file = tmp_path / "results.jsonl"
    file.write_text(
        "\n".join(map(report.to_line, (replace(bad, status=PASSED), good, bad, whole))) + '\n{"na'
    )
    found = report.read(file)
    assert found == {"add_1": good, "add_2": bad, "lu_1": whole}
    assert report.read(tmp_path / "none") == {}
    lines = report.report(found.values(), "Title").splitlines()
    assert lines[0] == "# Title"
    assert (
        lines[2].startswith("3 cases in ") and "1 passed, 1 whole only" in lines[2] and "1 failed" in lines[2]
    )
    assert "| add | 2 | 1 |  |  |  | 1 | sort (2) |" in lines
    assert "| lu | 1 |  | 1 |  |  |  | lu (1) |" in lines
    at = lines.index("- `add_2`")
    assert lines[at + 1] == "  - attempt 1, (2, 4), staying, in_sbp ([S(0), B])"
    assert lines[at + 2] == "  - mismatch: 1 of 2 elements differ"
    assert report.report([good], "Title").endswith("## Failed: 0\n\nNone.\n")


def test_cases_are_chosen_by_shard_group_and_name() -> None:
    cases = [Case(n, n[0], None) for n in ("a1", "a2", "b1", "b2")]
    assert [c.name for c in choose(cases, "1/2", "", "")] == ["a2", "b2"]
    assert [c.name for c in choose(cases, "0/1", "b", "1$")] == ["b1"]
