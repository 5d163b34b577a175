"""Signatures as users write them: for whole pytrees of arguments, and in JAX's notation.

In: pytree prefixes, `PartitionSpec`s, `NamedSharding`s. Out: an N-D signature per leaf, or the mistakes. Used
by: `annotation`, the compiler, the calls of a program.
"""
