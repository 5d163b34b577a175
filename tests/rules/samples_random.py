"""Applications of random numbers and keys."""

import jax
import numpy as np

from tests.rules.claims import Sample, sample

KEY, KEYS = jax.random.key(7), jax.random.split(jax.random.key(8), 5)
BOX = jax.random.split(jax.random.key(9), (3, 2))
RBG, RBGS = jax.random.key(7, impl="rbg"), jax.random.split(jax.random.key(7, impl="rbg"), 5)


def bits(key: jax.Array, shape: tuple[int, ...], width: int = 32, **options: object) -> Sample:
    """Random bits, of as many keys as there are."""
    fn = lambda k: jax.random.bits(k, shape, np.dtype(f"uint{width}"))  # noqa: E731
    for _ in key.shape:
        fn = jax.vmap(fn)
    label = f"{key.dtype}{key.shape}-{shape}-{width}"
    return sample("random_bits", fn, key, label=label, **options)


SAMPLES = [
    bits(KEY, (5, 7), pairs=2),
    bits(KEY, (5, 7), 8),
    bits(KEY, (3, 5, 2), 16, groups=(3,)),
    bits(KEY, ()),
    bits(KEY, (1,), groups=(2,)),
    bits(KEYS, (4,), pairs=2),
    bits(BOX, (), groups=(3,)),
    bits(BOX, (2,), groups=(2,)),
    bits(RBG, (5, 4), groups=(2,)),
    bits(RBGS, (4,), groups=(2,)),
    sample("random_split", lambda k: jax.random.split(k, 4), KEY, groups=(2,)),
    sample("random_split", jax.vmap(lambda k: jax.random.split(k, 4)), KEYS, groups=(3,), label="keys"),
    sample("random_fold_in", jax.random.fold_in, KEY, np.uint32(3), groups=(2,)),
    sample("random_fold_in", jax.vmap(jax.random.fold_in), KEYS, np.arange(5, dtype=np.uint32), label="keys"),
    sample(
        "random_fold_in",
        jax.vmap(jax.random.fold_in, (None, 0)),
        KEY,
        np.arange(5, dtype=np.uint32),
        label="data",
    ),
    sample("random_seed", jax.random.key, np.int32(3), groups=(2,)),
    sample("random_seed", jax.vmap(jax.random.key), np.arange(5), groups=(3,), label="keys"),
    sample("random_wrap", jax.random.wrap_key_data, np.arange(10, dtype=np.uint32).reshape(5, 2)),
    sample("random_unwrap", jax.random.key_data, KEYS),
    sample("random_unwrap", jax.random.key_data, KEY, groups=(2,)),
    sample("random_gamma", jax.random.gamma, KEY, np.ones((3, 2), np.float32), groups=(2,)),
    sample(
        "random_gamma",
        jax.vmap(jax.random.gamma),
        KEYS,
        np.arange(1, 6, dtype=np.float32),
        groups=(2,),
        label="keys",
    ),
    sample("random_clone", jax.random.clone, KEYS, groups=(3,)),
]

# With 64-bit types.
WIDE = [
    sample("random_bits", lambda k: jax.random.bits(k, (5, 3), np.uint64), KEY, groups=(3,), label="64"),
    sample(
        "gather",
        lambda x, i: x[i],
        np.arange(14.0).reshape(7, 2),
        np.array([6, -9, 1]),
        groups=(2,),
        label="int64",
    ),
    sample(
        "convert_element_type",
        lambda x: x.astype(np.int64),
        np.arange(5, dtype=np.int32),
        groups=(3,),
        label="int64",
    ),
]
