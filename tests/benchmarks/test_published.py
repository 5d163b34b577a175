"""Published steps: rows are read, models are laid out, planned and compared; on rows made up here."""

import csv
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.published import __main__ as published
from benchmarks.published import chips, figures, frameworks, kernels, moved, recompute
from benchmarks.published.estimate import Estimate, Estimator, stages_of
from benchmarks.published.figures import Outcome
from benchmarks.published.layout import Lying
from benchmarks.published.model import KEPT, Decoder, Stage
from benchmarks.published.rows import Experts, Layout, PublishedStep, RowError, parse, read
from sbp import B, P, S
from sbp.hardware.catalogue import hardware_for
from sbp.passes.boxing.links import Network

CELLS = {
    "model": "Tiny",
    "layers": "4",
    "d_model": "256",
    "heads": "4",
    "kv_heads": "2",
    "d_ff": "512",
    "vocabulary": "1,024",
    "experts": "",
    "seq": "128",
    "global_batch": "16",
    "micro_batch_per_gpu": "1",
    "precision": "bf16",
    "chip": "H100-SXM-80GB",
    "gpus": "8",
    "dp": "1",
    "fsdp": "8",
    "tp": "1",
    "pp": "1",
    "vp": "",
    "cp": "1",
    "ep": "1",
    "activation_checkpointing": "none",
    "optimizer": "AdamW",
    "step_seconds": "0.01",
    "date": "2025-01",
    "notes": "",
}


def row(**changed: str) -> PublishedStep:
    return parse(1, CELLS | changed)


LAYOUTS = {
    "fsdp": row(),
    "fsdp in 8 bits": row(precision="fp8 linears", notes="policy save_qkv_proj"),
    "copies and tensor": row(dp="4", fsdp="1", tp="2"),
    "pipeline": row(dp="2", fsdp="1", tp="2", pp="2"),
    "interleaved": row(dp="4", fsdp="1", pp="2", vp="2"),
    "context": row(dp="4", fsdp="1", cp="2"),
    "experts": row(dp="4", fsdp="1", ep="4", pp="2", experts="2/8", activation_checkpointing="full"),
    "two matrices, no kernel": row(d_ff="1024", dp="8", fsdp="1", precision="fp16", date="2021"),
    "rounds that are not equal": row(dp="2", fsdp="1", tp="2", pp="2", vp="2", global_batch="10"),
    "latent": row(model="DeepSeek-V0", kv_heads="4", experts="2+1 shared/8+1 shared", ep="8"),
    "units": row(framework="torchtitan (PyTorch FSDP2)"),
    "units of widths in 8 bits": row(framework="torchtitan", fsdp="4", tp="2", precision="fp8"),
    "a loop": row(framework="Paxml (JAX/XLA)", dp="2", fsdp="4"),
}


QUICK = ("copies and tensor", "pipeline", "two matrices, no kernel")


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS]
)
def test_every_way_of_parallelism_is_estimated(name: str) -> None:
    found = Estimator(LAYOUTS[name]).estimate()
    assert 1e-5 < found.passes <= found.seconds < 1.0
    assert (found.bubble > 0) == (LAYOUTS[name].layout.pp > 1)
    assert found.update > 0


@pytest.mark.full
def test_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "steps.csv", tmp_path / "found.json"
    wrong = CELLS | {"gpus": "7"}
    with open(file, "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, CELLS)
        writer.writeheader()
        writer.writerows([CELLS, wrong, CELLS | {"chip": "X9"}, CELLS])
    published.main([str(file), "--rows", "1,2,3", "--out", str(out), "--processes", "1"])
    said = capsys.readouterr().out
    assert "row 2 (Tiny): fsdp8 are 8 devices, not 7" in said
    assert "not expressed: RowError: chip 'X9' is none of A100" in said
    assert "all: 1 rows, factor" in said
    first, second = json.loads(out.read_text())
    assert first["ratio"] == pytest.approx(first["estimate"]["seconds"] / 0.01)
    assert second["estimate"] is None


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"global_batch": "12"}, "12 sequences are not whole micro-batches"),
        ({"dp": "3", "fsdp": "1", "gpus": "3", "ep": "2"}, "16 sequences|2 expert ranks do not lie"),
        ({"experts": "2/6", "ep": "4"}, "6 experts do not divide over 4 devices"),
        ({"experts": "many"}, "experts 'many' are not 'active/all'"),
        ({"precision": "int4"}, "precision 'int4' is neither fp8, bf16 nor fp16"),
    ],
)
def test_rows_that_contradict_themselves(changed: dict[str, str], why: str) -> None:
    with pytest.raises(RowError, match=why):
        row(**changed)


def test_a_row_without_a_number(tmp_path: Path) -> None:
    file = tmp_path / "steps.csv"
    file.write_text("model,layers\nTiny,many\n")
    (found,) = read(file)
    assert isinstance(found, RowError) and "row 1 (Tiny)" in str(found)


def test_cells() -> None:
    found = row(experts="8+1 shared/64+1 shared", notes="first 3 layers dense with d_ff 999", date="2023")
    assert found.experts == Experts(8, 64, 1, 3, 999)
    assert (found.vocabulary, found.layout, found.year) == (1024, Layout(fsdp=8), 2023.5)
    assert found.gated and not row(d_ff="1024").gated
    assert row(experts="-").experts is None
    assert Decoder(row(heads="5")).head_width == 64
    assert row(activation_checkpointing="").checkpointing == "unknown"


def test_stages_share_layers() -> None:
    deep = replace(row(), layers=61, experts=Experts(8, 256, 1, 3), layout=Layout(pp=16))
    stages = stages_of(deep)
    assert [s.dense + s.sparse for s in stages] == [3, 3] + [4] * 13 + [3]
    assert (stages[0].dense, sum(s.dense for s in stages)) == (3, 3)
    assert stages[0].first and stages[-1].last and not any(s.first or s.last for s in stages[1:-1])


@pytest.mark.full
def test_attention_is_one_op_with_the_gradients_of_many() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (2, 2, 3, 8, 4))
    k, v = (jax.random.normal(key, (2, 2, 8, 4)) for key in keys[1:3])
    ct = jax.random.normal(keys[3], q.shape)
    for a, b in zip(
        jax.tree.leaves(jax.vjp(kernels.fused_attention, q, k, v)[1](ct)),
        jax.tree.leaves(jax.vjp(kernels.plain_attention, q, k, v)[1](ct)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        kernels.fused_attention(q, k, v), kernels.plain_attention(q, k, v), rtol=1e-5, atol=1e-5
    )


def test_products_in_8_bits_have_operands_in_8_bits() -> None:
    x, w = jax.random.normal(jax.random.key(0), (2, 8, 16)), jax.random.normal(jax.random.key(1), (16, 4))

    def loss(x: jax.Array, w: jax.Array, eight: bool) -> jax.Array:
        return jnp.sum(kernels.product(x, w, eight) ** 2)

    grads = jax.grad(partial(loss, eight=True), (0, 1))
    text = str(jax.make_jaxpr(grads)(x, w))
    assert text.count("dot_general") == 3 and "f8_e4m3fn" in text
    for a, b in zip(grads(x, w), jax.grad(partial(loss, eight=False), (0, 1))(x, w), strict=True):
        assert float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) < 0.1


@pytest.mark.full
def test_experts_compute_what_their_tokens_need() -> None:
    """With equal experts a mixture is an MLP, whatever goes where."""
    sizes = replace(row(experts="2/4"), width=8, hidden=16, sequence=16)
    model = Decoder(replace(sizes, experts=Experts(2, 4)), groups=2)
    key = jax.random.key(0)
    one = {
        n: jax.random.normal(jax.random.fold_in(key, i), x.shape)
        for i, (n, x) in enumerate(model.leaves(Stage(0, 1))["sparse"].items())
    }
    same = one | {n: jnp.broadcast_to(w[:1], w.shape) for n, w in one.items() if n.startswith("expert_")}
    same["router"] = jnp.zeros((8, 4))
    plain = {n: same[f"expert_{n}"][0] for n in ("gate", "up", "down")}
    x = jax.random.normal(key, (3, 16, 8))
    mixed = jnp.einsum(
        "bsd,->bsd", model.experts(x, same), jnp.float32(2.0)
    )  # each of 2 of 4 weighs a quarter
    np.testing.assert_allclose(mixed, model.mlp(x, plain), rtol=2e-2, atol=2e-2)


def test_what_is_kept() -> None:
    hardware = chips.hardware_of("H100-SXM-80GB")

    def kept(**changed: str) -> set[str]:
        return set(recompute.kept_results(row(**changed), hardware))

    assert kept(activation_checkpointing="none") == set(KEPT)
    assert kept(activation_checkpointing="full") == set()
    some = {"activation_checkpointing": "selective"}
    assert kept(**some, notes="remat policy save_qkv_proj") == {"qkv", "context"}
    assert kept(**some, notes="Q, K, V, attention-out and MLP-out kept") == {"qkv", "context", "out", "down"}
    assert kept(**some, notes="policy SAVE_DOT_ONLY") == set(KEPT)
    assert kept(**some, notes="only attention core recomputed") == set(KEPT) - {"context"}
    assert "up" not in kept(**some) and "up" in kept(**some, dp="4", fsdp="1", tp="2")
    unknown = {"activation_checkpointing": "unknown"}
    assert kept(**unknown) == set(KEPT)
    assert kept(**unknown, seq="40000000") == set()


def test_signatures() -> None:
    lying = Lying("h100", Layout(dp=2, fsdp=4, tp=2))
    leaf = Decoder(row()).leaves(Stage(1))["dense"]["down"]
    assert [a.name for a in lying.axes] == ["dp", "fsdp", "tp"]
    assert lying.used(leaf) == (B, B, S(0))
    assert lying.kept(leaf) == (B, S(1), S(0))
    assert lying.gradient(leaf) == (P, S(1), S(0))
    assert [a.name for a in lying.one_copy.axes] == ["fsdp", "tp"]
    assert lying.activations() == (S(0), S(0), S(1))
    experts = Lying("h100", Layout(dp=4, ep=2, cp=2))
    assert [a.name for a in experts.one_copy.axes] == ["ep", "cp"]
    leaf = Decoder(row(experts="2/8")).leaves(Stage(0, 1))["sparse"]["expert_up"]
    assert experts.used(leaf) == (B, S(0), B)
    assert experts.gradient(leaf) == (P, S(0), P)
    assert (experts.vector(True).copies, experts.vector(False).copies) == (4, 8)
    assert experts.vector(False).at_rest == (S(1),) * 3


@pytest.mark.parametrize(
    "changed", [{"dp": "2", "tp": "4"}, {"dp": "4", "cp": "2", "ep": "2", "experts": "2/8"}]
)
def test_sums_stay_with_the_devices_of_their_part(changed: dict[str, str]) -> None:
    """A vector that was cut by copies before it is cut by widths would have to be sent on to others; and
    whatever is sent is counted, if it is no sum by name."""
    one = Estimator(row(**{"fsdp": "1"} | changed))
    (stage,) = stages_of(one.row)
    program, found = one._program(stage, one.lying), one._end_seconds(stage)
    plans = [plan for plan in map(program.update_plan, (False, True)) if plan is not None]
    kinds = [c.kind for plan in plans for c in plan.collectives]
    assert "permute" not in kinds
    sent = [c for plan in plans for c in plan.collectives]
    gathered = [c.seconds for c in sent if c.kind == "all_gather" and len(c.shape) == 2]
    assert len(gathered) == len(plans) < len(sent)
    assert found.send == pytest.approx(sum(gathered))
    assert found.sum == pytest.approx(sum(c.seconds for c in sent) - found.send)
    assert found.sum + found.send + found.update == pytest.approx(sum(plan.seconds for plan in plans))


def test_figures() -> None:
    def outcome(number: int, measured: float, estimated: float) -> Outcome:
        x = replace(row(), number=number, seconds=measured)
        return Outcome(x, Estimate(estimated, 0, 0, 0, 0, ()))

    found = [outcome(1, 1.0, 1.1), outcome(2, 2.0, 2.0), outcome(3, 3.0, 2.0)]
    assert [x.ratio for x in found] == pytest.approx([1.1, 1.0, 2 / 3])
    mean, each = figures.rank_correlation(found)
    assert mean == each["h100 16 bit (3)"] == pytest.approx(0.866, abs=1e-3)
    lines = [
        *figures.head().splitlines(),
        *map(figures.line, found),
        figures.line(Outcome(row(), reason="no")),
    ]
    assert len(lines) == 6 and len({line.count("|") for line in lines}) == 1
    assert figures.summary([]) == "no row was expressed"
    x = row(layers="1", seq="64", experts="")
    weights = 256 * 256 * 3 + 3 * 256 * 512 + 1024 * 256 + 3 * 256
    assert math.isclose(figures.model_flops(x), x.tokens * (6 * weights + 6 * 256 * 64))
    share = figures.mfu(x, figures.baseline_seconds(x))
    assert share == pytest.approx(figures.BASELINE["bf16"])


def test_chips() -> None:
    assert chips.kind_of("H200-SXM") == "h200"
    slow = chips.hardware_of("H100-SXM-96GB-HBM2e-500W")
    assert slow.memory_bytes_per_second == 2.4e12
    whole = chips.hardware_of("H100-SXM-80GB")
    product = 1, 4096, 4096, 4096, 2.0
    assert hardware_for("h100").product_seconds(*product) < whole.product_seconds(*product)
    assert whole.product_seconds(*product) < slow.product_seconds(*product)
    sent = "all_gather", 1e9, range(16)
    assert whole.collective_seconds(*sent) < hardware_for("h100").collective_seconds(*sent)
    hops = "all_gather", 1e5, range(256)
    fast = replace(whole, nic_bytes_per_second=1e15)
    assert fast.collective_seconds(*hops) == pytest.approx(31.875 * (14e-6 + 6e-6) + 45e-6, rel=1e-2)
    flops, eight = 2 * 4096.0**3, (1, 4096, 4096, 4096, 1.0)
    assert whole.product_seconds(*eight) == pytest.approx(flops / (0.709 * 0.87 * 1.97834e15), rel=1e-3)
    b200 = chips.hardware_of("B200")
    assert b200.product_seconds(*eight) == hardware_for("b200").product_seconds(*eight) / b200.clock
    assert hardware_for("h100").beside_share == 1.0 and whole.beside_share == 1 - 20 / 132
    near = "all_gather", 1e9, range(8)
    assert whole.collective_seconds(*near) == hardware_for("h100").collective_seconds(*near)
    with pytest.raises(RowError, match="chip 'X9' is none of"):
        chips.kind_of("X9")


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("MaxText (JAX/XLA)", frameworks.MAXTEXT),
        ("Paxml (JAX/XLA)", frameworks.PAXML),
        ("torchtitan (PyTorch FSDP2)", frameworks.FSDP2),
        ("NeMo AutoModel (PyTorch FSDP2)", frameworks.FSDP2),
        ("llm-foundry/Composer (PyTorch FSDP1)", frameworks.FSDP1),
        ("Megatron-Bridge (PyTorch)", frameworks.BRIDGE),
        ("NeMo/Megatron-Core (PyTorch)", frameworks.MEGATRON),
        ("", frameworks.PLANNER),
    ],
)
def test_what_a_framework_does(cell: str, expected: frameworks.Framework) -> None:
    assert row(framework=cell).framework == expected


def test_a_kernel_of_attention_that_a_framework_calls() -> None:
    """FlashAttention-2 is slower than cuDNN's on Hopper, and PyTorch's choice there; elsewhere it is not."""

    def kernels_of(**changed: str) -> str:
        one = row(**changed)
        heads = jax.ShapeDtypeStruct((1, one.sequence, one.width), jnp.bfloat16)
        model, stage = Decoder(one), Stage(1)
        (layer,) = model.shapes(stage, jnp.bfloat16)["dense"]
        return str(jax.make_jaxpr(model.attention)(heads, layer))

    assert "published_flash2_attention" in kernels_of(framework="torchtitan")
    assert "published_attention" in kernels_of(framework="torchtitan", chip="A100")
    assert "published_attention" in kernels_of(framework="NeMo/Megatron-Core")
    assert kernels.FLASH2_SHARE < kernels.FUSED_SHARE


@pytest.mark.full
def test_layers_in_a_loop_are_those_one_by_one() -> None:
    plain, loop = (Decoder(row(framework=cell)) for cell in ("", "Paxml"))
    assert not row(framework="Paxml", notes="scan off").in_loop
    stage, key = Stage(3), jax.random.key(0)
    shapes = loop.shapes(stage, jnp.bfloat16)
    assert shapes["dense"]["up"].shape == (3, 256, 512) and shapes["ends"]["head"].shape == (256, 1024)
    weights = jax.tree.map(lambda x: 0.1 * jax.random.normal(key, x.shape, x.dtype), shapes)
    listed = weights | {"dense": [{n: x[i] for n, x in weights["dense"].items()} for i in range(3)]}
    tokens = jax.random.randint(key, (2, 128), 0, 1024)
    np.testing.assert_allclose(
        loop.run(stage, weights, tokens, tokens), plain.run(stage, listed, tokens, tokens), rtol=1e-2
    )


def test_weights_gathered_layer_by_layer() -> None:
    """Kernels hide what is sent beside them, and are slowed down by it; no layer ends before it is sent."""
    one = Estimator(row(framework="torchtitan"))
    assert one._beside(1.0, 0.0) == 1.0
    assert one._beside(1.0, 0.5) == pytest.approx(1.0 + 0.5 * 20 / 132)
    assert one._beside(0.1, 0.5) == 0.5
    few, many = (one._in_units(seconds, Stage(1, 0, False, False)) for seconds in (0.0, 1.0))
    assert 0 < few < 1e-3 and 1.0 < many < 1.0 + few
    wide = Estimator(row(framework="torchtitan", fsdp="4", tp="2"))
    network = Network(wide.lying.one_copy.placement, wide.hardware)
    sent = wide._between_products(network)
    again = Estimator(row(framework="torchtitan", fsdp="4", tp="2", activation_checkpointing="full"))
    assert 0 < sent < again._between_products(network)
    assert one._between_products(network) == 0.0
    # Layers without experts in a model that has some: the devices of an expert's group cut them too.
    mixed = Estimator(row(framework="NeMo AutoModel (PyTorch FSDP2)", ep="8", experts="2/8"))
    dense = Stage(1, 0, False, False)
    assert mixed._in_units(0.0, dense) == pytest.approx(one._in_units(0.0, dense), rel=0.1)


def test_what_is_copied() -> None:
    """Second copies of 8-bit operands on Hopper, a look for the largest value, and what was gathered."""
    stage = Stage(1, 0, False, False)
    eight = {"precision": "fp8", "fsdp": "1", "dp": "8"}
    tokens, weights = 128, 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512 + 2 * 256
    operands = tokens * (256 + 256 + 256 + 512 + 256 + 256 + 512 + 2 * 512)

    def bytes_of(**changed: str) -> float:
        return moved.moved_bytes(row(**changed), stage)

    assert bytes_of() == bytes_of(**eight, chip="B200") == 0.0
    assert bytes_of(**eight) == 2 * (operands + weights)
    assert bytes_of(**eight, framework="Megatron-Bridge") == 2 * (operands + weights) + 2 * operands
    assert bytes_of(**eight, framework="Megatron-Bridge", chip="B200") == 2 * operands
    assert bytes_of(framework="torchtitan") == weights * (2 * (2 + 2) + 2 + 4)
    assert bytes_of(framework="llm-foundry") == 0.0


def test_without_sequence_parallel_all_have_all_of_the_sequence() -> None:
    alone = row(dp="1", fsdp="1", tp="8", notes="full recompute, no sequence parallel")
    assert not alone.sequence_parallel and row().sequence_parallel
    assert Estimator(alone).lying.activations() == (B,)
    assert Estimator(row(dp="1", fsdp="1", tp="8")).lying.activations() == (S(1),)
    assert Estimator(alone).lying.one_copy.groups == 1
