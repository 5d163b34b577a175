"""A plan as Python: it runs and gives the program's numbers, bit for bit, and it reads well."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import pallas

import sbp
from models import gpt, mlp
from sbp import AUTO, B, S
from sbp.__main__ import main
from sbp.errors import ArgumentError
from sbp.passes.render.program_source import ProgramSource
from sbp.rules.shards import bind, on_shards
from tests.annotated import annotated
from tests.golden import two_layers
from tests.models import test_recommenders as recommenders
from tests.runtime.lower import test_control_flow as loops
from tests.runtime.lower.test_recompute import arguments, step
from tests.runtime.source.equal import GRID, SPLITTING, checked

COLLECTIVES = ("psum", "pmax", "all_gather", "psum_scatter", "all_to_all", "ppermute")
WIDTH = 100


def drawn(shapes: Any) -> Any:
    """Arrays of some shapes."""
    leaves, tree = jax.tree.flatten(shapes)

    def draw(k: int, x: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(0), k)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return key
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jax.random.randint(key, x.shape, 0, 5).astype(x.dtype)
        return 0.1 * jax.random.normal(key, x.shape, x.dtype)

    return jax.tree.unflatten(tree, [draw(k, x) for k, x in enumerate(leaves)])


def sent(source: ProgramSource) -> int:
    """How many collectives a source has."""
    return len(re.findall(rf"\blax\.({'|'.join(COLLECTIVES)})\(", source.text))


def test_two_layers_read_as_they_were_written() -> None:
    source = checked(two_layers.step, drawn(two_layers.small_args), in_sbp=two_layers.step_sbp(GRID))
    assert source.given == {} and source.constants == ()
    for line in (
        'MESH = Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 4), ("data", "model"))',
        "    PartitionSpec(None, \"model\"),  # weights['up'] float32[8, 16]",
        "def step_on_device(down, up, x):",
        '    # two_layers.py:11  hidden = jnp.tanh(x @ weights["up"])',
        '    x_whole = lax.all_gather(x, "data", axis=0, tiled=True)  # float32[32, 8] [B, B]',
        "    hidden = jnp.tanh(x_whole @ up)  # float32[32, 4] [B, S(1)]",
        "    product = hidden @ down  # float32[32, 8] [B, P]",
        '    product_summed = lax.psum(product, "model")  # float32[32, 8] [B, B]',
        "    grad_down = hidden.T @ scaled  # float32[4, 8] [B, S(0)]",
        "    new_down = down - 0.1 * grad_down  # float32[4, 8] [B, S(0)]",
    ):
        assert line in source.text.splitlines()
    rows = re.findall(r"# (row\d+): (\w+) over", source.text)
    assert rows == [("row0", "all_gather"), ("row1", "all_reduce")] and sent(source) == 2


def test_mlp_with_adam_updates_every_weight_by_one_function() -> None:
    source = checked(mlp.train_step, drawn(mlp.train_step_args()), in_sbp=mlp.train_step_sbp(GRID))
    assert source.text.count("def update(") == 1
    assert len(re.findall(r"= update\(", source.text)) == 8


@pytest.mark.full
def test_gpt_is_of_a_reader_s_length() -> None:
    """Two layers on 2 x 4: equal layers are one function that is called twice, forward and backward."""
    config = gpt.Config(layers=2, width=32, heads=4, vocabulary=64, sequence=16)
    optimizer = optax.adam(0.01)

    def train_step(params: Any, state: Any, tokens: Any, key: Any) -> Any:
        value, grads = jax.value_and_grad(gpt.loss)(params, tokens, key, config)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = gpt.init(jax.random.key(0), config)
    tokens = jax.random.randint(jax.random.key(1), (8, 17), 0, 64)
    args = params, optimizer.init(params), tokens, jax.random.key(2)
    source = checked(train_step, args, close=2e-6, in_sbp=(AUTO, AUTO, [S(0), B], AUTO))
    lines = source.text.splitlines()
    assert len(lines) <= 600
    assert max(map(len, lines)) <= WIDTH
    for name in ("layer", "layer_backward"):
        assert source.text.count(f"def {name}(") == 1
        assert len(re.findall(rf"= {name}\(", source.text)) == 2
    assert len(re.findall(r"= update\(", source.text)) == 24
    assert "jax.random.split(key, 7)" in source.text


@pytest.mark.full
def test_tables_by_rows_are_exchanges_by_name() -> None:
    learner, on = recommenders.learner(), recommenders.LINE
    params = jax.jit(learner.init)(jax.random.key(0))
    args = params, jax.jit(learner.init_state)(params), recommenders.batch(0)
    source = checked(learner.step, args, on, in_sbp=learner.in_sbp(on))
    assert re.search(r'sbp\.shards\.on_shards\(\s*"sbp_lookup', source.text)
    assert re.search(r'sbp\.shards\.on_shards\(\s*"sbp_update_rows"', source.text)


@pytest.mark.some(6, "whiles-auto")
@pytest.mark.parametrize("how", ("tensor", "auto"))
@pytest.mark.parametrize("name", loops.PROGRAMS)
def test_loops_and_branches(name: str, how: str) -> None:
    """12 rows over 8 devices and 16 columns over 3 are uneven: their padding stands there."""
    shape, in_sbp = loops.SIGNATURES[how]
    on = sbp.placement("cpu", shape=shape)
    kept = annotated(loops.PROGRAMS[name], on, in_sbp)
    source = checked(kept, (loops.W, loops.X), on, in_sbp=in_sbp, options=loops.OPTIONS)
    words = {
        "whiles": "lax.while_loop(condition, body, ",
        "branches": "lax.switch(",
        "layers": "lax.scan(body, ",
    }
    assert words.get(name, "") in source.text


@pytest.mark.full
def test_sections_and_recomputation_are_barriers() -> None:
    """Under a limit on memory."""
    on = sbp.placement("cpu", shape=(4,))
    program = sbp.compile(step, on, donate_argnums=0)
    least = program.plan(*arguments()).memory_bytes
    source = checked(step, arguments(), on, donate_argnums=0, options=sbp.Options(memory_limit=0.8 * least))
    assert "lax.optimization_barrier(" in source.text
    assert "@functools.partial(jax.jit, donate_argnums=" in source.text


def test_long_bodies_are_called_by_name() -> None:
    """A window that reaches over the border of a shard, a random mask, a sum along a split dim."""

    def fn(x: Any, w: Any, key: Any) -> Any:
        mask = jax.random.bernoulli(key, 0.5, x.shape)
        y = lax.reduce_window(jnp.where(mask, x, 0), 0.0, lax.add, (1, 3), (1, 1), "SAME")
        return jnp.cumsum(sbp.annotate(y * w, [S(1)]), axis=1)

    args = jnp.ones((2, 18)), jnp.ones((2, 18)), jax.random.key(0)
    on = sbp.placement("cpu", shape=(4,))
    source = checked(fn, args, on, in_sbp=([S(1)], [S(1)], [B]), options=sbp.Options(hardware=SPLITTING))
    for op in ("reduce_window_sum", "random_bits", "cumsum"):
        assert re.search(rf'sbp\.shards\.on_shards\(\s*"{op}"', source.text)


def test_what_no_text_can_say_is_given() -> None:
    """A kernel, and arrays that the function closes over."""
    table = jnp.asarray(np.random.default_rng(0).normal(size=(40, 8)), jnp.float32)

    def double(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = 2 * x_ref[...]

    def fn(x: Any) -> Any:
        twice = pallas.pallas_call(
            double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, name="double"
        )
        return twice(x) + table

    source = checked(fn, (jnp.ones((40, 8)),), sbp.placement("cpu", shape=(4,)), in_sbp=([S(0)],))
    assert list(source.given) == ["double"] and 'given["double"](' in source.text
    assert len(source.constants) == 1 and "constant_0 float32[40, 8]" in source.text


def test_functions_without_arguments_without_elements_and_without_results() -> None:
    on = sbp.placement("cpu", shape=(4,))
    checked(lambda: jnp.arange(8.0), (), on)
    checked(lambda x: x.sum(0), (jnp.zeros((0, 8)),), on)
    assert "return ()" in checked(lambda x: (), (jnp.ones(8),), on).text


def test_saved_it_runs_by_itself(tmp_path: Path) -> None:
    args = drawn(two_layers.small_args)
    program = sbp.compile(two_layers.step, GRID, in_sbp=two_layers.step_sbp(GRID))
    program.source(*args).save(tmp_path / "step.py")
    module: dict[str, Any] = {}
    exec(compile((tmp_path / "step.py").read_text(), "step.py", "exec"), module)
    got = module["step"](*jax.tree.leaves(args))
    for a, b in zip(got, jax.tree.leaves(program(*args)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_command_line_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "step.py"
    file = Path(two_layers.__file__)
    assert main(["plan", f"{file}:step", "--placement", "h100:2x4", "--source", str(out)]) == 0
    assert f"saved {out}" in capsys.readouterr().out
    assert 'jax.devices("gpu")[:8]' in out.read_text() and "def step_on_device(" in out.read_text()


def test_it_is_the_same_each_time() -> None:
    plans = [sbp.compile(two_layers.step, GRID).plan(*two_layers.small_args) for _ in range(2)]
    assert plans[0].source() == plans[1].source()
    assert repr(plans[0].source()).startswith("<Source of step: ")


def test_a_plan_that_was_asked_otherwise_has_one() -> None:
    plan = sbp.compile(two_layers.step, GRID).plan(*two_layers.small_args)
    other = plan.what_if("x", [S(0), S(1)])
    assert 'PartitionSpec("data", "model"),  # x ' in other.source().text


def test_a_plan_from_a_file_has_none(tmp_path: Path) -> None:
    sbp.compile(two_layers.step, GRID).plan(*two_layers.small_args).save(tmp_path / "plan.json")
    with pytest.raises(ArgumentError, match=r"a plan of 'step' without its program"):
        sbp.load_plan(tmp_path / "plan.json").source()


def test_a_primitive_that_is_none() -> None:
    with pytest.raises(ArgumentError, match="such as 'integer_pow'"):
        bind("integer_power", jnp.ones(2), y=3)


def test_shards_without_a_mesh() -> None:
    lies = ((8,), [S(0)])
    with pytest.raises(ArgumentError, match=r"legal  a call inside jax\.shard_map"):
        on_shards("cumsum", jnp.ones(8), takes=[lies], gives=[lies], axis=0, reverse=False)
