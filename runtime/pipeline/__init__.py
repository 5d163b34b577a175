"""Pipelines on devices: the pieces of each placement as programs, run in the order of a schedule.

In: the pieces and the schedule of a plan. Out: a `CompiledPipeline` that runs a step. Used by: `compile`,
`profile`, `ahead_of_time`, `saved`.
"""
