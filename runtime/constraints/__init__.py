"""A plan as constraints in a program of plain `jax.jit`.

In: a `Program`. Out: a function that `jax.jit` lays out as the plan says. Used by: users, as `sbp.constrain`.
"""
