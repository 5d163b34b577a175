"""The logical program: what the user's function computes, as frozen values.

In: a JAX function and its arguments. Out: a `Traced` graph, every op with its line. Every later room reads
it; it knows none of them.

Words: docs/glossary.md.
"""
