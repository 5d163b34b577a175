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
    bits(KEY, (5, 7), pairs=4), bits(KEY, (5, 7), 8), bits(KEY, (3, 5, 2), 16, groups=(2, 3)), bits(KEY, ()),
    bits(KEY, (1,), groups=(2,)), bits(KEYS, (4,), pairs=4), bits(BOX, (), groups=(2, 3)), bits(BOX, (2,), groups=(2,)),
    bits(RBG, (5, 4), groups=(2,)), bits(RBGS, (4,), groups=(2,)),
    sample("random_split", lambda k: jax.random.split(k, 4), KEY, groups=(2,)),
    sample("random_split", jax.vmap(lambda k: jax.random.split(k, 4)), KEYS, groups=(2, 3), label="keys"),
    sample("random_fold_in", jax.random.fold_in, KEY, np.uint32(3), groups=(2,)),
    sample("random_fold_in", jax.vmap(jax.random.fold_in), KEYS, np.arange(5, dtype=np.uint32), label="keys"),
    sample("random_fold_in", jax.vmap(jax.random.fold_in, (None, 0)), KEY, np.arange(5, dtype=np.uint32), label="data"),
    sample("random_seed", jax.random.key, np.int32(3), groups=(2,)),
    sample("random_seed", jax.vmap(jax.random.key), np.arange(5), groups=(2, 3), label="keys"),
    sample("random_wrap", jax.random.wrap_key_data, np.arange(10, dtype=np.uint32).reshape(5, 2)),
    sample("random_unwrap", jax.random.key_data, KEYS),
    sample("random_unwrap", jax.random.key_data, KEY, groups=(2,)),
    sample("random_clone", jax.random.clone, KEYS, groups=(2, 3)),
]
