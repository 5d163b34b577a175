"""Compiled programs in files: one process writes them, another one runs them without compiling.

In: a compiled signature of a program. Out: a file per process, and what it holds. Used by:
`Program.save_executable`, `sbp.load_executable`.
"""
