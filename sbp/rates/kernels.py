"""What every kernel of a GPU takes beside the rates of its chip."""

LAUNCH_SECONDS = 1e-6
"""Beside its work: XLA's own figure (xla/service/gpu/model/gpu_performance_model_base)."""
MEMORY_SHARE = 0.9
"""Of the nominal bandwidth of the memory: an assumption of ours, which no measurement here backs. XLA's own
model takes all of it."""
