"""NaN and infinities: in the results of every op, and in a state that is saved.

In: a physical program, or a state. Out: a `Finding` with the first op that made a NaN, or the leaves that are
not finite. Used by: `execute`, `pipeline`, `checkpoint`.
"""
