"""Units for readers, names of notebook cells, and a reader of JSON that may be damaged.

In: figures and files. Out: short texts, and checked values. Used by: all code that prints or reads files.
"""
