"""Planning: the signatures that every op may have, what they cost, and the search for the cheapest.

In: the logical graph, pins, and `Boxings`. Out: `ChosenSignatures` with a proven bound. Used by the chain
and by what explains its choices; it knows `program` and `boxing`.

Words: docs/glossary.md.
"""
