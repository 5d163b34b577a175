"""Checkpoints: state that is saved from one placement and restored to any other one.

In: a folder and a state. Out: a step in the folder, or a state with the layout of a program. Used by:
`training`, and users as `sbp.Checkpoints`, `sbp.save`, `sbp.restore`.
"""
