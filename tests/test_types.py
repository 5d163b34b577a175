"""What a type checker sees of a program: the parameters and results of the user's function."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import sbp

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mypy") is None, reason="mypy is not installed: the extra `test` brings it"
)

BEGINNING = """\
import functools
import jax, jax.numpy as jnp, sbp

line, x = sbp.placement("cpu", shape=(2,)), jnp.ones(4)

def step(state: dict[str, jax.Array], x: jax.Array, *, rate: float = 0.1) -> tuple[dict[str, jax.Array], str]:
    return state, "done"

program = sbp.compile(step, line, in_sbp=(sbp.AUTO, [sbp.S(0)]), donate_argnums=0)
parts = sbp.microbatch(step, 2, batch_args=1)

@functools.partial(sbp.compile, placement=line, in_sbp=[sbp.S(0)])
def decorated(x: jax.Array) -> jax.Array:
    return 2 * x

"""
ARRAY = "jax._src.basearray.Array"
RESULT = f"tuple[dict[str, {ARRAY}], str]"
# A line of the user's -> what is said of it; "" for nothing.
LINES = {
    "program({}, x)": "",
    "program({}, x=x, rate=0.2)": "",
    "program({})": 'Missing positional argument "x"',
    "program({}, x, lr=0.2)": 'Unexpected keyword argument "lr"',
    "program({}, x, rate=x)": 'Argument "rate"',
    "reveal_type(program({}, x))": RESULT,
    "program.profile({})": 'Missing positional argument "x"',
    "sbp.verify(program, {})": 'Missing positional argument "x"',
    "sbp.verify(program, {}, x).largest": "",
    "program.plan({}, jax.eval_shape(jnp.ones, 4)).seconds": "",
    "reveal_type(program.plan({}, x))": "sbp.passes.face.Plan",
    "reveal_type(program.lower({}, x))": "jax._src.stages.Lowered",
    "decorated()": 'Missing positional argument "x"',
    "reveal_type(decorated(x))": ARRAY,
    "sbp.compile(lambda x: x, line)(x, x)": "Too many arguments",
    "sbp.compile(jax.jit(step), line)({}, x)": "",
    "sbp.compile(jax.value_and_grad(step), line)({}, x)": "",
    "sbp.compile(parts, line)({})": 'Missing positional argument "x"',
    "reveal_type(parts({}, x))": RESULT,
    "reveal_type(sbp.annotate(x, sbp.S(0)))": ARRAY,
    "sbp.annotate(x, 0)": 'Argument 2 to "annotate"',
    "sbp.rows(step)": 'Argument 1 to "rows"',
    "reveal_type(sbp.load_plan('plan.json'))": "sbp.passes.face.Plan",
    "sbp.compiled": 'no attribute "compiled"',
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What mypy says of each line, all of them in one run."""
    from mypy import api

    folder = tmp_path_factory.mktemp("types")
    user, settings = folder / "user.py", folder / "mypy.ini"
    user.write_text(BEGINNING + "\n".join(LINES), encoding="utf-8")
    settings.write_text(f"[mypy]\nmypy_path = {ROOT}\nfollow_imports = silent\n", encoding="utf-8")
    found, errors, _ = api.run([f"--config-file={settings}", f"--cache-dir={folder / 'cache'}", str(user)])
    assert not errors
    out = dict.fromkeys(LINES, "")
    for number, kind, message in re.findall(r"user\.py:(\d+): (error|note): (.*)", found):
        at = int(number) - BEGINNING.count("\n") - 1
        assert at >= 0, message
        line = list(LINES)[at]
        if kind == "error" or line.startswith("reveal_type"):
            out[line] += message
    return out


@pytest.mark.full
@pytest.mark.parametrize("line", LINES)
def test_a_checker_sees_the_function(line: str, said: dict[str, str]) -> None:
    if LINES[line]:
        assert LINES[line] in said[line]
    else:
        assert not said[line]


def test_the_face_for_checkers_is_the_face() -> None:
    """Names come late at run time, and are imported for checkers alone: both from the same modules."""
    source = (ROOT / "sbp" / "__init__.py").read_text(encoding="utf-8")
    (guard,) = (x for x in ast.parse(source).body if isinstance(x, ast.If) and x.orelse)
    imports = [x for x in guard.body if isinstance(x, ast.ImportFrom)]
    seen = {alias.name: str(x.module) for x in imports for alias in x.names}
    packages = {name: module.rpartition(".")[0] for name, module in sbp._MODULES.items()}
    assert seen == {**sbp._FACE, **packages}
