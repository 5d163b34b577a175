"""Devices and links: a catalogue of chips, and machines of one's own from a file.

In: a device kind, or a TOML file. Out: `Hardware`, the rates that plans use. Used by: `placement`, the
compiler.
"""

from sbp.hardware.catalogue import BYTES_ONLY, CATALOGUE, Hardware, Link, hardware_for
from sbp.hardware.file import hardware_from

__all__ = ["BYTES_ONLY", "CATALOGUE", "Hardware", "Link", "hardware_for", "hardware_from"]
