"""Signatures as users write them, for whole pytrees of arguments and in JAX's own notation.

In: pytree prefixes, `PartitionSpec`s, `NamedSharding`s. Out: N-D signatures per leaf, or what is wrong. Used
by: `annotation`, the compiler, the calls of a program.
"""
