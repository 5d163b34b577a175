"""The GPT on one device against loops in NumPy; its table of signatures; its options."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from models import gpt, parallel
from sbp import B, S

TINY = gpt.Config(layers=2, width=16, heads=4, vocabulary=11, sequence=6, dropout=0.25)
KEY = jax.random.key(3)
TOKENS = np.random.default_rng(0).integers(0, TINY.vocabulary, size=(3, TINY.sequence + 1)).astype(np.int32)


@pytest.fixture(scope="module")
def params() -> gpt.PyTree:
    return jax.jit(partial(gpt.init, config=TINY))(KEY)


@pytest.fixture(scope="module")
def logits(params: gpt.PyTree) -> np.ndarray:
    return np.asarray(score(params, TOKENS[:, :-1]))


score = jax.jit(lambda params, tokens: gpt.logits(params, tokens, None, TINY))


def test_heads_divide_the_width() -> None:
    with pytest.raises(ValueError, match="width of 16 over 3 heads"):
        gpt.Config(width=16, heads=3)


def test_attention_is_what_a_loop_computes(params: gpt.PyTree) -> None:
    layer = params["layers"][0]
    x = np.random.default_rng(1).normal(size=(2, 5, TINY.width)).astype(np.float32)
    (query, key, value), out = np.asarray(layer["qkv"]), np.asarray(layer["out"])
    expected = np.zeros_like(x)
    for b, i, h in np.ndindex(2, 5, TINY.heads):
        q = x[b, i] @ query[:, h]
        weights = np.exp([q @ (x[b, j] @ key[:, h]) / np.sqrt(TINY.head_width) for j in range(i + 1)])
        mixed = sum(w * (x[b, j] @ value[:, h]) for j, w in enumerate(weights / weights.sum()))
        expected[b, i] += mixed @ out[h]
    np.testing.assert_allclose(gpt.attention(x, layer, None, TINY), expected, rtol=1e-4, atol=1e-5)


def test_the_future_is_not_seen(params: gpt.PyTree, logits: np.ndarray) -> None:
    changed = TOKENS[:, :-1].copy()
    changed[:, 3] = (changed[:, 3] + 1) % TINY.vocabulary
    after = np.asarray(score(params, changed))
    np.testing.assert_array_equal(after[:, :3], logits[:, :3])
    assert (np.abs(after[:, 3:] - logits[:, 3:]).max(axis=-1) > 1e-4).all()


def test_loss_is_the_mean_surprise(params: gpt.PyTree, logits: np.ndarray) -> None:
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    picked = [
        probability[b, i, TOKENS[b, i + 1]] for b, i in np.ndindex(TOKENS.shape[0], TOKENS.shape[1] - 1)
    ]
    np.testing.assert_allclose(gpt.loss(params, TOKENS, None, TINY), -np.mean(np.log(picked)), rtol=1e-5)


@pytest.mark.full
def test_the_dtype_of_the_layers_is_not_that_of_the_loss(params: gpt.PyTree) -> None:
    half = replace(TINY, compute_dtype=jnp.bfloat16)
    assert gpt.logits(params, TOKENS[:, :-1], None, half).dtype == jnp.bfloat16
    loss, grads = jax.value_and_grad(gpt.loss)(params, TOKENS, None, half)
    assert {x.dtype for x in jax.tree.leaves((loss, grads))} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(loss, gpt.loss(params, TOKENS, None, TINY), rtol=0.02)


def test_dropout_keeps_the_mean_and_follows_its_key() -> None:
    x = jnp.ones(20_000)
    dropped = np.asarray(gpt.drop(x, KEY, 0.25))
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs(dropped.mean() - 1) < 0.02
    np.testing.assert_array_equal(dropped, gpt.drop(x, KEY, 0.25))
    assert (dropped != gpt.drop(x, jax.random.key(4), 0.25)).any()
    assert gpt.drop(x, None, 0.25) is x
    assert gpt.drop(x, KEY, 0.0) is x


@pytest.mark.full
def test_loss_falls_on_one_device(params: gpt.PyTree) -> None:
    optimizer = optax.adamw(1e-2)
    step = jax.jit(gpt.make_train_step(TINY, optimizer))
    state, losses = optimizer.init(params), []
    for index in range(30):
        params, state, loss = step(params, state, TOKENS, jax.random.fold_in(KEY, index))
        losses.append(float(loss))
    assert np.mean(losses[-5:]) < 0.5 * losses[0]


@pytest.mark.parametrize("prompt", [[1], [1, 2, 3, 4, 5, 6, 7, 8]])
def test_greedy_text_is_the_most_likely_one(params: gpt.PyTree, prompt: list[int]) -> None:
    """Also after the window is full, when it slides."""
    seen, length = list(prompt), TINY.sequence + 3
    for _ in range(length):
        last = seen[-TINY.sequence :]
        padded = np.pad(last, (0, TINY.sequence - len(last)))[None]
        seen.append(int(score(params, padded)[0, len(last) - 1].argmax()))
    written = gpt.sample(params, np.array(prompt, np.int32), KEY, config=TINY, length=length, temperature=0.0)
    assert written.tolist() == seen[len(prompt) :]


def test_sampled_text_follows_the_probabilities(params: gpt.PyTree, logits: np.ndarray) -> None:
    draw = jax.vmap(lambda key: gpt.sample(params, TOKENS[0, :1], key, config=TINY, length=1)[0])
    drawn = np.bincount(draw(jax.random.split(KEY, 4000)), minlength=TINY.vocabulary) / 4000
    expected = np.exp(logits[0, 0]) / np.exp(logits[0, 0]).sum()
    np.testing.assert_allclose(drawn, expected, atol=0.03)


OPTIMIZER = optax.adamw(1e-3)


@pytest.mark.parametrize(
    ("choice", "shape", "qkv", "embedding", "batch"),
    [
        ("data", (8,), [B], [B], [S(0)]),
        ("data", (2, 4), [B, B], [B, B], [S(0), S(0)]),
        ("tensor", (4,), [S(2)], [S(0)], [B]),
        ("tensor", (2, 2), [S(2), S(2)], [S(0), S(0)], [B, B]),
        ("2d", (2, 4), [B, S(2)], [B, S(0)], [S(0), B]),
        ("2d", (2, 2, 2), [B, S(2), S(2)], [B, S(0), S(0)], [S(0), B, B]),
        ("zero", (8,), [S(1)], [S(1)], [S(0)]),
        ("zero", (2, 4), [S(1), S(1)], [S(1), S(1)], [S(0), S(0)]),
    ],
)
def test_table_of_signatures(
    choice: str, shape: tuple[int, ...], qkv: list, embedding: list, batch: list
) -> None:
    weights, state, of_batch, of_key = gpt.signatures(choice, shape, TINY, OPTIMIZER)
    assert weights["layers"][1]["qkv"] == qkv
    assert weights["embedding"] == embedding  # a vocabulary of 11 never divides
    assert (of_batch, of_key) == (batch, [B] * len(shape))
    adam = state[0]
    assert adam.mu == adam.nu == weights
    assert adam.count == [B] * len(shape)


@pytest.mark.parametrize("choice", ["data", "tensor", "2d", "zero"])
def test_every_parameter_has_a_signature_of_its_own_dims(choice: str, params: gpt.PyTree) -> None:
    weights, *_ = gpt.signatures(choice, (2, 2), TINY, OPTIMIZER)

    def check(x: jax.Array, signature: list) -> None:
        assert len(signature) == 2
        assert all(s == B or s.dim < x.ndim for s in signature)

    jax.tree.map(check, params, weights)


def test_what_no_dim_divides_stays_whole() -> None:
    weights, *_ = gpt.signatures("zero", (7,), TINY, OPTIMIZER)
    assert weights["layers"][0]["up"] == weights["norm"]["bias"] == [B]


def test_auto_leaves_all_open() -> None:
    assert gpt.signatures("auto", (2, 4), TINY, OPTIMIZER) == (sbp.AUTO,) * 4


def test_two_dimensions_need_two_axes() -> None:
    with pytest.raises(ValueError, match=r"--parallel 2d uses 2 placement axes, but --placement has 1"):
        gpt.signatures("2d", (8,), TINY, OPTIMIZER)


def test_options() -> None:
    args = gpt.parser().parse_args([])
    assert (args.placement, args.parallel, args.check) == ("cpu:2x4", "2d", True)
    sizes = "--layers 3 --width 32 --heads 2 --seq 9 --batch 5 --vocab 257 --dropout 0"
    rest = "--placement cpu:8 --parallel zero --steps 7 --lr 0.5 --seed 2 --out d --no-check"
    args = gpt.parser().parse_args(f"{sizes} {rest}".split())
    assert (args.layers, args.width, args.heads, args.seq, args.batch, args.vocab) == (3, 32, 2, 9, 5, 257)
    assert (args.placement, args.parallel, args.steps, args.lr, args.seed) == ("cpu:8", "zero", 7, 0.5, 2)
    assert (args.dropout, args.out, args.check) == (0.0, "d", False)


@pytest.mark.parametrize("choice", ["data", "tensor", "2d", "zero", "auto"])
def test_every_choice_is_in_the_table(choice: str) -> None:
    assert gpt.parser().parse_args(["--parallel", choice]).parallel in parallel.PARALLEL


def test_unknown_choice_names_the_legal_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpt.parser().parse_args(["--parallel", "magic"])
    said = capsys.readouterr().err
    assert all(choice in said for choice in ("magic", "2d", "data", "tensor", "zero", "auto"))
