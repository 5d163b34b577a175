"""What must run on a machine with GPUs."""
