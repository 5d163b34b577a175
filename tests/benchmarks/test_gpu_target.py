"""The table of GPU targets: its rows, its figures, its text; the layout of its peer."""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from benchmarks import gpu_target, maxtext
from benchmarks.gpu_target import TargetProgram, TargetRow, auto_table, scheduled, summary, table
from benchmarks.large import LARGE
from benchmarks.versus_jax import parse, peer_of
from models import llama
from sbp import B, S
from sbp.runtime.hlo.parser import parse as parse_hlo
from tests.runtime.target.plugin import needs_plugin

JIT = TargetProgram(2e6, 4e9, 3, 1, 0.02, 0.01, 0.3, 10.0)
OURS = TargetProgram(1e6, 5e9, 4, 0, 0.01, 0.0, 0.6, 20.0)
ROWS = (TargetRow("gpt@2/data:8", JIT, OURS, 1e6, 4e9), TargetRow("gpt@2/zero:8", JIT, JIT, 1e6, 4e9))


def test_a_row_as_text() -> None:
    *_, first, _ = table(ROWS).splitlines()
    cells = [cell.strip() for cell in first.split("|")[1:-1]]
    assert cells[:7] == ["gpt@2/data:8", "2.0", "1.0", "1.0", "4.00", "4.00", "5.00"]
    assert cells[7:] == ["3 + 1", "4 + 0", "20.00", "10.00", "0.50", "10.00", "0.00", "10", "20"]
    assert len({line.count("|") for line in table(ROWS).splitlines()}) == 1


def test_summary_names_what_was_lost_and_where_the_plan_is_off() -> None:
    said = summary(ROWS).splitlines()
    assert said[0] == "wire bytes: geometric mean 0.71 of jit's; rows lost: none"
    assert said[1] == "memory: geometric mean 1.12 of jit's; rows lost: gpt@2/data:8 1.25"
    assert said[2] == "simulated step: geometric mean 0.71 of jit's; rows lost: none"
    assert said[4] == "wire bytes, plan / compiled, off by more than 1%: gpt@2/zero:8 0.50"
    assert said[5] == "memory, plan / compiled, off by more than 10%: gpt@2/data:8 0.80"


def test_a_table_that_was_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([asdict(row) for row in ROWS]))
    assert gpu_target.read(file) == list(ROWS)
    gpu_target.main(["--show", str(file)])
    assert capsys.readouterr().out.rstrip() == f"{table(ROWS)}\n\n{auto_table(ROWS)}\n\n{summary(ROWS)}"
    gpu_target.main(["--show", str(file), str(file)])
    assert capsys.readouterr().out.count("gpt@2/data:8 |") == 1


def timed(row: str, ours: float, theirs: float) -> TargetRow:
    return TargetRow(row, replace(JIT, step_seconds=theirs), replace(OURS, step_seconds=ours), 0.0, 0.0)


def test_the_peer_of_auto_is_that_of_a_row_by_hand() -> None:
    found = gpu_target._data_parallel
    assert found("llama@8/auto:2x4") == ["llama@8/data:2x4", "llama@8/data:8"]
    assert found("dlrm/auto:8")[0] == "dlrm/rows:8" and found("llama@8/zero:8") == []


def test_auto_beside_the_best_by_hand() -> None:
    rows = [timed("gpt@2/2d:2x4", 0.02, 0.03), timed("gpt@2/data:8", 0.012, 0.0099)]
    rows += [timed("gpt@2/auto:2x4", 0.0101, 0.011), timed("gpt/auto:8", 0.0099, 0.01)]
    rows += [timed("gpt@12/zero:8", 0.001, 0.001), timed("flax/auto:8", 0.01, 0.02)]
    grid, line, alone = auto_table(rows).splitlines()[2:]
    # On the same placement its own peer is best; of as many devices jit's on one axis.
    assert "| 11.00 (gpt@2 data parallel, jit) | 0.918 | 9.90 (gpt@2/data:8, jit) | 1.020 | met |" in grid
    assert "| 9.90 (gpt@2/data:8, jit) | 1.000 |" in line and line.endswith("| met |")
    assert "20.00 (flax data parallel, jit) | 0.500" in alone
    slow = timed("gpt@2/auto:2x4", 0.0113, 0.011)
    assert auto_table([slow]).endswith("| 1.027 | SHORT |")


def test_collectives_beside_kernels_and_not() -> None:
    module = parse_hlo("""HloModule m, num_partitions=4, replica_count=1
%wrapped (a: f32[8]) -> f32[32] {
  %a = f32[8]{0} parameter(0)
  ROOT %inner = f32[32]{0} all-gather(%a), replica_groups=[1,4]<=[4], dimensions={0}, channel_id=1,
    use_global_device_ids=true
}
ENTRY %main (p: f32[8]) -> f32[32] {
  %p = f32[8]{0} parameter(0)
  %one = ((f32[8]{0}), f32[32]{0}) async-start(%p), calls=%wrapped
  %two = ((f32[8]{0}), f32[32]{0}) all-gather-start(%p), replica_groups=[1,4]<=[4], dimensions={0},
    channel_id=2, use_global_device_ids=true
  %three = ((f32[8]{0}), f32[32]{0}) all-gather-start(%p), replica_groups=[1,4]<=[4], dimensions={0},
    channel_id=3, use_global_device_ids=true, backend_config={"collective_backend_config":{"is_sync":true}}
  ROOT %four = f32[32]{0} all-gather(%p), replica_groups=[1,4]<=[4], dimensions={0}, channel_id=4,
    use_global_device_ids=true
}""")
    assert scheduled(module) == (2, 2)


@pytest.mark.full
def test_every_row_has_a_model_and_fits_its_devices() -> None:
    """Signatures are resolved for the peer, which takes even splits only; nothing is traced or allocated."""
    for row in (*gpu_target.ROWS, "llama70b/fsdp:16x8", "llama70b/zero:128"):
        model, _, choice, shape = parse(row)
        placement = sbp.placement("h100", shape=shape)
        case = LARGE[model](choice, shape, 2)
        mesh = jax.sharding.AbstractMesh(shape, placement.axes)
        args = case.shapes()
        _, named = peer_of(case, args, placement, mesh)  # type: ignore[arg-type]
        for x, sharding in zip(jax.tree.leaves(args), jax.tree.leaves(named), strict=True):
            sharding.shard_shape(x.shape)


@pytest.mark.full
def test_the_peer_is_the_same_model() -> None:
    config = llama.Config(1, 32, 8, 4, 48, 40, 6, remat=False)
    optimizer, placement = optax.sgd(0.1), sbp.placement("cpu", shape=(2, 4))
    params = jax.jit(partial(llama.init, config=config))(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 40, (4, 7)).astype(np.int32)
    args = params, optimizer.init(params), tokens, jax.random.key(0)
    peer = maxtext.make_train_step(config, optimizer, placement.mesh, placement)
    ours, theirs = jax.jit(llama.make_train_step(config, optimizer))(*args), jax.jit(peer)(*args)
    np.testing.assert_allclose(ours[2], theirs[2], rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), ours[0], theirs[0])


def test_the_layout_is_that_of_the_rules() -> None:
    config = replace(llama.PRESETS["tiny"])
    weights, state, batch, _ = maxtext.signatures((2, 4), config, optax.adamw(1e-3))
    assert weights["layers"]["query"] == [S(1), S(2)]
    assert weights["layers"]["down"] == [S(2), S(1)]
    assert weights["layers"]["mlp_norm"] == [B, S(1)]
    assert weights["embedding"] == [S(1), S(0)]
    assert (batch, state[0].mu) == ([S(0), B], weights)
    # But for the norms that is what "fsdp" says.
    ours = llama.signatures("fsdp", (2, 4), config, optax.adamw(1e-3))[0]
    norms = ("attention_norm", "mlp_norm")
    assert {k: v for k, v in ours["layers"].items() if k not in norms} == {
        k: v for k, v in weights["layers"].items() if k not in norms
    }
    assert maxtext.signatures((8,), config, optax.adamw(1e-3))[0]["head"] == [S(0)]


@needs_plugin
def test_a_small_row(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    from benchmarks.cases import mlp_case

    monkeypatch.setattr(gpu_target, "LARGE", {"mlp": mlp_case})
    found = gpu_target.measure("mlp/zero:8", tmp_path)
    assert found.sbp.wire_bytes == pytest.approx(found.plan_wire_bytes, rel=0.01)
    for program in (found.jit, found.sbp):
        assert 0 <= program.exposed_seconds < program.step_seconds < 1e-2
        assert program.memory_bytes > 0 and program.asynchronous + program.synchronous > 0
    assert {f.name for f in tmp_path.iterdir()} == {"mlp.zero.8.jit.hlo", "mlp.zero.8.sbp.hlo"}
    again = gpu_target.measure("mlp/zero:8", None, {"mlp/zero:8": JIT})
    assert again.jit == JIT and again.sbp.wire_bytes == found.sbp.wire_bytes


def test_bfloat16_is_in_the_products_of_the_gpt() -> None:
    case = LARGE["gpt-bf16"]("data", (8,), 1)
    text = str(jax.make_jaxpr(case.step)(*case.shapes()))
    products = [line for line in text.splitlines() if "= dot_general" in line]
    assert products and all("bf16" in line for line in products)
    assert jax.tree.leaves(case.shapes()[0])[0].dtype == jnp.float32
