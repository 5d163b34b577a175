"""The checker: plans of every kind add up, and whatever is spoiled in one is found."""

import copy
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from benchmarks.cases import CASES, gpt_case
from sbp import B, S
from sbp.__main__ import main
from sbp.checker.moves import wrong_move, wrong_permute
from sbp.checker.report import check_plan
from sbp.checker.shards import fits, read_signature
from sbp.passes.face import Plan

GRID = sbp.placement("h100", shape=(2, 4), axes=("data", "model"))
LINE = sbp.placement("cpu", shape=(8,))


def data_of(plan: Plan, folder: Path) -> Any:
    plan.save(folder / "plan.json")
    return json.loads((folder / "plan.json").read_text(encoding="utf-8"))


@pytest.mark.some(1, "gpt-cpu:8")
@pytest.mark.parametrize("place", [GRID, LINE], ids=("h100:2x4", "cpu:8"))
@pytest.mark.parametrize("name", CASES)
def test_the_plans_of_the_benchmarks_add_up(name: str, place: sbp.Placement, tmp_path: Path) -> None:
    if name == "grouped" and place.ndim > 1:
        pytest.skip("signatures of one axis")
    case = CASES[name]("rows" if name == "embedding" else "auto", place.shape, 1)
    in_sbp = sbp.AUTO if name == "embedding" and place.ndim > 1 else case.in_sbp
    plan = sbp.compile(case.step, place, in_sbp=in_sbp, donate_argnums=(0, 1)).plan(*case.shapes())
    report = check_plan(data_of(plan, tmp_path))
    assert not report.complaints and "everything adds up" in str(report)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "args"),
    [("dlrm", "train_step_args"), ("llama", "example_args"), ("mlp", "train_step_args")],
)
def test_the_plans_of_models_add_up(name: str, args: str, tmp_path: Path) -> None:
    model = importlib.import_module(f"models.{name}")
    for place in (GRID, sbp.placement("cpu", shape=(2, 2, 2))):
        program = sbp.compile(model.train_step, place, in_sbp=model.train_step_sbp(place))
        report = check_plan(data_of(program.plan(*getattr(model, args)()), tmp_path))
        assert not report.complaints


def test_a_program_of_its_own_kind_of_loop(tmp_path: Path) -> None:
    def looped(x: Any, w: Any) -> Any:
        out = jax.lax.while_loop(lambda c: jnp.sum(c) > 1, lambda c: jnp.tanh(c @ w), x)
        return jax.lax.cond(jnp.sum(out) > 0, lambda: out @ w, lambda: out)

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    for place in (GRID, LINE):
        plan = sbp.compile(looped, place, in_sbp=([S(0)] * place.ndim, [S(1)] * place.ndim)).plan(x, x)
        assert not check_plan(data_of(plan, tmp_path)).complaints


def test_what_is_sent_in_a_narrower_type(tmp_path: Path) -> None:
    def widened(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        return wide, wide

    x = jax.ShapeDtypeStruct((64, 64), jnp.float16)
    plan = sbp.compile(widened, LINE, in_sbp=[S(0)], out_sbp=[[S(0)], [B]]).plan(x)
    data = data_of(plan, tmp_path)
    assert not check_plan(data).complaints
    (move,) = (s for s in data["program"]["steps"] if "sent_as" in s)
    assert move["sent_as"] == ["float16", 2.0]
    move["sent_as"] = ["float64", 8.0]
    assert any("goes as float64, which is not narrower" in c for c in check_plan(data).complaints)
    del move["sent_as"]
    assert check_plan(data).complaints


def test_stages_are_checked_one_by_one(tmp_path: Path) -> None:
    whole = sbp.placement("h100", shape=(2, 4), axes=("stage", "data"))
    parts = whole.split("stage")

    def staged(x: Any, w: Any) -> Any:
        with sbp.on(parts[0]):
            h = jnp.tanh(x @ w)
        with sbp.on(parts[1]):
            return jnp.sum(h @ w)

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    data = data_of(sbp.compile(staged, whole, in_sbp=([S(0)], [B])).plan(x, x), tmp_path)
    report = check_plan(data)
    assert not report.complaints and len(report.parts) == 2
    data["stages"][1]["seconds"] *= 2
    assert check_plan(data).complaints[0].startswith("staged, placement 1 of 2: the totals:")


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A GPT whose plan has collectives of several kinds."""
    case = gpt_case("2d", GRID.shape, 1)
    program = sbp.compile(case.step, GRID, in_sbp=case.in_sbp, donate_argnums=(0, 1))
    return data_of(program.plan(*case.shapes()), tmp_path_factory.mktemp("gpt"))


def sending(data: Any) -> int:
    return next(i for i, s in enumerate(data["program"]["steps"]) if s.get("row") is not None)


def computing(data: Any, op: str = "dot_general") -> Any:
    return next(s for s in data["program"]["steps"] if s.get("op") == op)


def _drop_row(data: Any) -> None:
    del data["collectives"][0]


def _drop_move(data: Any) -> None:
    del data["program"]["steps"][sending(data)]


def _drop_both(data: Any) -> None:
    """A collective that nobody speaks of any more."""
    at = sending(data)
    row = data["program"]["steps"][at]["row"]
    del data["collectives"][row], data["program"]["steps"][at]


def _less_bytes(data: Any) -> None:
    data["collectives"][0]["wire_bytes"] *= 0.9


def _once_more(data: Any) -> None:
    data["collectives"][0]["count"] += 1


def _other_kind(data: Any) -> None:
    step = data["program"]["steps"][sending(data)]
    kind = "all_gather" if step["move"] != "all_gather" else "all_reduce"
    step["move"] = data["collectives"][step["row"]]["kind"] = kind


def _other_operand(data: Any) -> None:
    read = computing(data)["reads"][0]
    read[1] = "[S(1), S(1)]" if read[1] != "[S(1), S(1)]" else "[B, B]"


def _other_result(data: Any) -> None:
    made = computing(data)["writes"][0]
    made[1] = "[B, S(1)]" if made[1] != "[B, S(1)]" else "[B, B]"


def _sum_through_tanh(data: Any) -> None:
    step = computing(data, "tanh")
    (v, _), (w, _) = step["reads"][0], step["writes"][0]
    for s in data["program"]["steps"]:
        for version in (*s.get("reads", ()), *s.get("writes", ())):
            version[1] = "[P, B]" if version[0] in (v, w) else version[1]


def _argument(data: Any) -> None:
    data["in_sbp"][0] = "[S(0), B]" if data["in_sbp"][0] != "[S(0), B]" else "[B, B]"


def _faster_op(data: Any) -> None:
    computing(data, "tanh")["seconds"] /= 2


def _impossible_product(data: Any) -> None:
    computing(data)["seconds"] = data["hardware"]["launch_seconds"]


def _smaller_product(data: Any) -> None:
    computing(data)["work"]["product"][1] //= 2


def _less_time(data: Any) -> None:
    data["seconds"] *= 0.99


def _all_overlaps(data: Any) -> None:
    data["step_seconds"] = 0.5 * data["seconds"]


def _bound_above(data: Any) -> None:
    data["bound"] = 1.01 * data["seconds"]


def _less_memory(data: Any) -> None:
    data["memory_bytes"] *= 0.99


def _forgotten_argument(data: Any) -> None:
    v, nd = data["program"]["inputs"][0]
    data["memory_bytes"] -= sum(x[2] for x in data["program"]["peak"] if x[:2] == [v, nd])
    data["program"]["peak"] = [x for x in data["program"]["peak"] if x[:2] != [v, nd]]


def _below_rest(data: Any) -> None:
    data["memory_bytes"] = 1.0


def _no_program(data: Any) -> None:
    del data["program"]


def _no_field(data: Any) -> None:
    del data["hardware"]["links"]


SPOILS: dict[Callable[[Any], None], str] = {
    _drop_row: "is missing",
    _drop_move: "which nobody has made",
    _drop_both: "which nobody has made",
    _less_bytes: "and it should be",
    _once_more: "times",
    _other_kind: "does not lead from",
    _other_operand: "which nobody has made",
    _other_result: "which nobody has made",
    _sum_through_tanh: "of the parts of a sum",
    _argument: "argument 0 is",
    _faster_op: "and it should be",
    _impossible_product: "no such device does it in less",
    _smaller_product: "and its parts have",
    _less_time: "the steps add up to",
    _all_overlaps: "kernels alone take",
    _bound_above: "is above the time",
    _less_memory: "what is named adds up to",
    _forgotten_argument: "counts []",
    _below_rest: "at rest",
    _no_program: "save it again",
    _no_field: "a field is missing",
}


@pytest.mark.some(10, "all_overlaps")
@pytest.mark.parametrize("spoil", SPOILS, ids=lambda f: f.__name__.strip("_"))
def test_what_is_spoiled_is_found(gpt: Any, spoil: Callable[[Any], None]) -> None:
    assert not check_plan(gpt).complaints
    data = copy.deepcopy(gpt)
    spoil(data)
    if spoil is _no_field:
        data["hardware"]["chip"] = ""  # what asks for links
    found = check_plan(data).complaints
    assert any(SPOILS[spoil] in c for c in found), found[:5]


@pytest.mark.parametrize(
    ("kind", "axes", "before", "after", "wrong"),
    [
        ("all_gather", (0,), "[S(0), B]", "[B, B]", ""),
        ("all_gather", (0,), "[S(0), S(0)]", "[B, S(0)]", "lies inside"),
        ("all_gather", (0, 1), "[S(0), S(0)]", "[B, B]", ""),
        ("all_gather", (0,), "[S(0), S(1)]", "[B, B]", "changes axes"),
        ("all_gather", (0, 1), "[S(0), S(1)]", "[B, B]", "change differently"),
        ("reduce_scatter", (1,), "[B, P]", "[B, S(0)]", ""),
        ("reduce_scatter", (1,), "[B, P(max)]", "[B, S(0)]", "does not lead"),
        ("reduce_scatter", (0,), "[P, S(0)]", "[S(0), S(0)]", "lies inside"),
        ("all_reduce", (0,), "[P(max), P]", "[B, P]", "another reduction"),
        ("permute", (0, 1), "[P, B]", "[B, P]", "neither makes nor takes a sum"),
        ("teleport", (0,), "[B, B]", "[S(0), B]", "no move is called"),
    ],
)
def test_moves(kind: str, axes: tuple[int, ...], before: str, after: str, wrong: str) -> None:
    found = list(wrong_move(kind, axes, read_signature(before), read_signature(after)))
    assert wrong in found[0] if wrong else not found


def test_a_permute_finds_every_part() -> None:
    a, b = read_signature("[S(0), S(1)]"), read_signature("[S(1), S(0)]")
    assert not list(wrong_permute((4, 4), a, b, (2, 2)))
    assert "no device has" in next(
        wrong_permute((8, 8), read_signature("[S(0), B]"), read_signature("[S(1), B]"), (2, 2))
    )
    assert "padding" in next(wrong_permute((3, 4), a, b, (2, 2)))


def test_texts_that_are_no_signatures() -> None:
    with pytest.raises(ValueError, match="is no signature"):
        read_signature("[S0, B]")
    assert not fits((4,), ("S(1)",), (2,)) and not fits((), ("S(0)",), (2,)) and fits((), ("B",), (2,))


def test_on_the_command_line(gpt: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(gpt))
    assert main(["check", str(path)]) == 0 and "everything adds up" in capsys.readouterr().out
    path.write_text(json.dumps({**gpt, "bound": 1e9}))
    assert main(["check", str(path)]) == 1 and "is above the time" in capsys.readouterr().out
    path.write_text("no plan")
    assert main(["check", str(path)]) == 1 and "cannot be read as JSON" in capsys.readouterr().err
    path.write_text("[]")
    assert main(["check", str(path)]) == 1
