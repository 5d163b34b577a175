"""A plan beside what XLA made of it, as text, as a page and as files.

In: a plan, compiled programs, a simulated step. Out: a `ProgramReport` or a `PipelineReport`. Used by:
`ahead_of_time`, `program`.
"""
