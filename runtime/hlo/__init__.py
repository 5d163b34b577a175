"""Compiled programs as HLO text: parsed, their collectives and bytes measured, their ops traced back.

In: the HLO text of a compiled program. Out: a `Module`, a `Meter`, the `Origin` of each instruction. Used by:
`target`, `profile`, `report`, the benchmarks.
"""
