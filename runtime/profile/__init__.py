"""Steps that run, measured: whole, and divided by a profile into what the plan knows.

In: a program that was built, and the arguments of a call. Out: a `Profile` with what a step took beside what
the plan says. Used by: `Program.profile`.
"""
