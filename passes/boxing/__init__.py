"""Boxing: from one signature to another by the cheapest sequence of moves.

In: a tensor's shape, dtype, and two signatures. Out: the moves, with bytes and seconds. Every room behind it
uses it; it knows none of them.

Words: docs/glossary.md.
"""
