"""Plans made again: with a tensor held another way, or without a collective.

In: a plan, the traced program, the request, and what is held. Out: `HeldPlan`, `Removal`, or a whole `Plan`.
Used by `runtime/compile`; it knows the chain and all that the chain knows.

Words: docs/glossary.md.
"""
