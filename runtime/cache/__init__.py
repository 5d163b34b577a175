"""Folders in which the next process finds plans and compiled programs.

In: what was planned or compiled. Out: the same, if the file may be trusted. Used by: `compile`, `pipeline`,
`saved`.
"""
