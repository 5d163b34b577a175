"""Compiled programs in files: one process writes them, another one runs them, and compiles nothing.

In: what was built for one signature of a program; out: a file of each process, and a `Program` of it. Used by
`Program.save_executable` and `sbp.load_executable`.
"""
