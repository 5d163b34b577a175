"""The logical program: what the user's function computes, as frozen values.

In: a JAX function and its arguments. Out: a `TracedProgram` graph, every op with its line. Used by: every
later folder.

Words: docs/glossary.md.
"""
