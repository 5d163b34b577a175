"""The arrays of a state: split and named as orbax takes them, written and read, with checksums.

In: a pytree of `jax.Array`s. Out: the same on disk, or under another layout. Used by: `checkpoint`,
`sbp.to_host`.
"""
