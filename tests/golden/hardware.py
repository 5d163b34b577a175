"""Hardware of round figures that is no real chip: the golden texts must not change with the catalogue."""

from sbp.hardware.catalogue import Hardware, Link

HARDWARE = Hardware(
    name="golden",
    flops_per_second=((4, 100e12),),
    vector_flops_per_second=20e12,
    memory_bytes_per_second=2e12,
    memory_bytes=64e9,
    links=(Link(8, 200e9, 5e-6), Link(1 << 62, 50e9, 10e-6)),
    efficiency=1.0,
)
