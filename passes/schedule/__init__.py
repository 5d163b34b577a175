"""Pipeline schedules as data: made by name or by search, given their transfers, simulated, proven.

In: stages on ranks, a number of micro-batches, estimated times. Out: a `Schedule`, an order of actions per
rank, and what is known of it. Used by: pipelines and `render`.

- `orders`: `make(name, rank_of, microbatches)` is the `Schedule` of that name, or an error that says why it
  does not suit; `GENERATORS` is the table of names.
- `actions`: `Schedule` (`orders[rank]` is a tuple of `Action(kind, stage, microbatch, peer)`), `Kind`.
- `dataflow`: `Edge(source, target)`, for values that skip stages.
- `communication`: `add_transfers(schedule, edges)` adds sends and receives that cannot deadlock;
  `issue_order(schedule, edges)` is one order over all ranks, for a single driver.
- `deadlock`: `find_deadlock(schedule, edges)` is the circle of waits, None if there is none.
- `times`, `simulate`, `spans`: `simulate(schedule, Times(...), edges)` is a `Timeline` of `Span`s, with
  `makespan`, `bubble` and `bubble_fraction`. Measured spans make a `Timeline` too.
- `memory`: `peaks(schedule, Footprint(...))`.
- `search`: `search(rank_of, microbatches, times, footprint, limit_bytes)` finds one within a memory limit.

>>> from sbp.passes.schedule.communication import add_transfers, issue_order
>>> from sbp.passes.schedule.orders import make
>>> from sbp.passes.schedule.simulate import simulate
>>> from sbp.passes.schedule.times import equal_times
>>> schedule = make("1f1b", rank_of=(0, 1), microbatches=3)
>>> print(schedule)
1f1b: 2 stages on 2 ranks, 3 micro-batches
rank 0  F0:0 F0:1 B0:0 F0:2 B0:1 B0:2
rank 1  F1:0 B1:0 F1:1 B1:1 F1:2 B1:2
>>> print(*issue_order(add_transfers(schedule))[:6])
F0:0 SF0:0>1 RF1:0<0 F0:1 F1:0 SF0:1>1
>>> simulate(schedule, equal_times(2)).bubble
(3, 3)

Words: docs/glossary.md.
"""
