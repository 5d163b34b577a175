"""The search for signatures: candidates from many sources in one pool, of which the best is the plan.

In: candidates of every op, and what is asked. Out: `FoundSignatures`. Used by the chain, and by what explains
its choices; it knows `plan` and `physical`.

Words: docs/glossary.md.
"""
