"""Text for people: units, notebooks, and JSON that may be damaged.

In: figures and files. Out: short texts, or values that were checked. Used by: everything that shows or reads.
"""
