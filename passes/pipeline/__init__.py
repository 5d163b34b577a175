"""Pipelines: a program whose ops belong to several placements, taken apart into a program for each.

`where` says where every op belongs, `sums` keeps what is added up over micro-batches apart, `order` finds
stages and what of the backward pass others wait for, `split` makes a graph for each placement, `cut` takes
its physical program apart again, into the pieces that a schedule runs.
"""
