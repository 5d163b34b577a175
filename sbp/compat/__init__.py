"""Every touch of a JAX internal, and every difference between JAX versions and libraries.

In: JAX, its plugins, orbax, numba. Out: names with types that the rest of the code uses. Used by: everything.
"""
