"""Checkpoints: state that is saved from one placement and restored to any other one."""
