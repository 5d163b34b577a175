"""The program that XLA makes for GPUs that are not here: compiled, read, and its schedule simulated.

In: a program's plan and its lowered form. Out: the executable for the target, a report of plan against
compiled program, a simulated step with its trace. Used by: `Program.lower`, `Program.report`, the command
line.
"""
