"""The rates of this machine's devices, measured.

In: devices. Out: a TOML file that `hardware_from` reads. Used by: users, as `python -m sbp calibrate`.
"""
