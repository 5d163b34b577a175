"""Chips: what XLA must know to compile for one that is not here, and the peak rates of each.

The figures are those of XLA's own target descriptions (xla/backends/gpu/target_config/specs, Apache-2.0, of
2026-08-13); dense matrix rates are cores x units x operations per clock x 2 x matrix clock, and "f32" is
that of TF32. Where XLA has no measured tables of a chip, `tables` is "", and its collectives are by formula.

What every kernel of a GPU takes beside the rates of its chip.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chip:
    """One kind of GPU.

    Arguments:
      name: that of the catalogue (`sbp.hardware.CATALOGUE`).
      description: what the driver calls it; XLA's cost model goes by it.
      capability: CUDA compute capability.
      cores: streaming multiprocessors, each with 128 float32 units unless `units` says otherwise.
      clock_hertz: boost clock.
      memory_bytes, memory_bytes_per_second, l2_bytes: of one device, as XLA has them.
      sheet_bytes: the memory of one device on its data sheet; plans keep to this.
      vector_flops: of float32 arithmetic outside the matrix units, FLOP/s.
      matrix_flops: dense FLOP/s of the matrix units by operand type: "f64", "f32" (TF32), "bf16", "f8".
      host_devices: devices that one host has.
      domain_hosts: hosts that NVLink connects.
      link_bytes_per_second, link_latency_seconds: of NVLink, one way, per device: what collectives reach of
        its nominal rate, and what a small one takes. Used where nothing was measured.
      nic_bytes_per_second: of the network card of each device, one way.
      nic_latency_seconds: the launch of a collective between hosts, in XLA's model of NCCL; a send between
        stages takes no less.
      tables: the key of the tables that were measured on it; "" for none.
    """

    name: str
    description: str
    capability: tuple[int, int]
    cores: int
    clock_hertz: float
    memory_bytes: int
    sheet_bytes: float
    memory_bytes_per_second: float
    l2_bytes: int
    vector_flops: float
    matrix_flops: Mapping[str, float]
    host_devices: int = 8
    domain_hosts: int = 1
    link_bytes_per_second: float = 370e9
    link_latency_seconds: float = 8e-6
    nic_bytes_per_second: float = 50e9
    nic_latency_seconds: float = 45e-6
    tables: str = ""
    units: int = 128

    @property
    def domain_devices(self) -> int:
        """Devices that NVLink connects."""
        return self.host_devices * self.domain_hosts


def _rates(bf16: float, f64: float, f8: float | None = None) -> Mapping[str, float]:
    """Matrix rates; TF32 runs at half the rate of bfloat16, and chips without float8 at that of bfloat16."""
    return {"f64": f64, "f32": bf16 / 2, "bf16": bf16, "f8": bf16 if f8 is None else f8}


CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            name="a100",
            description="NVIDIA A100-SXM4-80GB",
            capability=(8, 0),
            cores=108,
            clock_hertz=1.41e9,
            memory_bytes=85100068864,
            sheet_bytes=80e9,
            memory_bytes_per_second=2039.04e9,
            l2_bytes=41943040,
            vector_flops=19.4918e12,
            matrix_flops=_rates(311.8694e12, 19.4918e12),
            link_bytes_per_second=240e9,
            link_latency_seconds=9e-6,
            nic_bytes_per_second=25e9,
            units=64,
        ),
        Chip(
            name="h100",
            description="NVIDIA H100 80GB HBM3",
            capability=(9, 0),
            cores=132,
            clock_hertz=1.98e9,
            memory_bytes=84942979072,
            sheet_bytes=80e9,
            memory_bytes_per_second=3352.32e9,
            l2_bytes=52428800,
            vector_flops=66.9082e12,
            matrix_flops=_rates(989.1703e12, 66.9082e12, 1978.3406e12),
            # XLA's own figure for this name; 400 Gb/s cards, as of the other chips, would be twice that.
            nic_bytes_per_second=25e9,
            tables="sm_90",
        ),
        Chip(
            name="h200",
            description="NVIDIA H200 141GB HBM3e",
            capability=(9, 0),
            cores=132,
            clock_hertz=1.98e9,
            memory_bytes=151397597184,
            sheet_bytes=141e9,
            memory_bytes_per_second=4800e9,
            l2_bytes=52428800,
            vector_flops=66.9082e12,
            matrix_flops=_rates(989.1703e12, 66.9082e12, 1978.3406e12),
            tables="sm_90",
        ),
        Chip(
            name="b200",
            description="NVIDIA B200",
            capability=(10, 0),
            cores=148,
            clock_hertz=1.965e9,
            memory_bytes=191514411008,
            sheet_bytes=180e9,
            memory_bytes_per_second=7672.32e9,
            l2_bytes=132644864,
            vector_flops=74.4499e12,
            matrix_flops=_rates(2225.1593e12, 37.225e12, 4450.3185e12),
            link_bytes_per_second=740e9,
            tables="sm_100_B200",
        ),
        Chip(
            name="gb200",
            description="NVIDIA GB200",
            capability=(10, 0),
            cores=152,
            clock_hertz=2.062e9,
            memory_bytes=197897748480,
            sheet_bytes=197e9,
            memory_bytes_per_second=7928.064e9,
            l2_bytes=135528448,
            vector_flops=80.2365e12,
            matrix_flops=_rates(2398.11e12, 40.1183e12, 4796.2199e12),
            link_bytes_per_second=740e9,
            host_devices=4,
            domain_hosts=18,
            tables="sm_100_GB200",
        ),
    )
}


LAUNCH_SECONDS = 1e-6
"""Beside its work: XLA's own figure (xla/service/gpu/model/gpu_performance_model_base)."""
MEMORY_SHARE = 0.9
"""Of the nominal bandwidth of the memory: an assumption of ours, which no measurement here backs. XLA's own
model takes all of it."""
