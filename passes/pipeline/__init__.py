"""Pipelines: a program whose ops belong to several placements, taken apart into a program for each.

`where` says where every op belongs, `order` finds stages (numbered by `numbering`) and what of the backward
pass others wait for, `sums` keeps what each stage adds up over micro-batches apart, `split` makes a graph for
each placement, `cut` takes its physical program apart again, into the pieces that a schedule runs. `edges`
says which stage feeds which, `check` what must hold of the pieces.
"""
