"""Boxing: from one signature to another by the cheapest sequence of moves.

In: a tensor's shape, dtype, and two signatures. Out: the moves, with bytes and seconds. Used by: every folder
behind it.

Words: docs/glossary.md.
"""
