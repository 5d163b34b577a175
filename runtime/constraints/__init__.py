"""A plan as constraints in a program of plain `jax.jit`."""
