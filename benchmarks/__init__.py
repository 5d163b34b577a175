"""Measurements: each prints a table beside the best peer a JAX user has."""
