"""Ops of JAX without a rule, and why: what XLA on CPU can run and no rule, expansion or loop covers.

Such an op runs whole on every device, and the plan says so, unless its reason says that it is refused or
cannot stand in a program.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MissingRules:
    """Ops that have no rule for one reason.

    Arguments:
      ops: the names of their primitives.
      why: the reason, as a sentence for the docs.
    """

    ops: tuple[str, ...]
    why: str


def _ops(names: str, why: str) -> MissingRules:
    return MissingRules(tuple(names.split()), why)


WITHOUT = (
    _ops(
        "call_exported",
        "A program that was already compiled to StableHLO. It runs whole.",
    ),
    _ops(
        "pallas_call ffi_call",
        "A kernel, which the compiler cannot look into. It runs whole, unless `sbp.register_rule` splits it.",
    ),
    _ops(
        "pure_callback",
        "A function of the host, which the compiler cannot look into. It runs whole on each device.",
    ),
    _ops(
        "buffer_callback mpmd_map",
        "Foreign code on whole buffers, which the compiler cannot look into. It runs whole.",
    ),
    _ops(
        "io_callback check",
        "Refused, with what to write instead: a callback that changes the host, a check outside "
        "`checkify.checkify`, a sharding instead of `sbp.annotate`.",
    ),
    _ops(
        "inspect_sharding dce_sink",
        "No result: it is dropped. The shardings of a program are in its plan.",
    ),
    _ops(
        "csr_spmv csr_spmm spsolve",
        "A sparse matrix in one library call: its rows are found through a pointer per row, which no split "
        "keeps. It runs whole; BCOO and BCSR products are seen through to gathers and sums.",
    ),
    _ops(
        "compute_on",
        "Ops for the host: seen through they would run on the devices. They run whole.",
    ),
    _ops("mulhi", "XLA compiles it for one device only, under `jax.jit` too."),
    _ops(
        "psum_start psum_done psum_invariant_start all_gather all_gather_start all_gather_done "
        "all_gather_invariant all_gather_reduced all_gather_reduced_start all_to_all all_to_all_start "
        "all_to_all_done ppermute ppermute_start ppermute_done pbroadcast_done reduce_scatter "
        "reduce_scatter_start reduce_scatter_done ragged_all_to_all unreduced_psum unreduced_psum_start "
        "unreduced_pmax unreduced_pmin unreduced_reduce_scatter unreduced_reduce_scatter_start psend precv "
        "preduced axis_index pvary reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast "
        "vary_unreduced_cast_p",
        "Over the axes of a mesh: they stand inside `jax.shard_map` only, which becomes a program for one "
        "device (see [coming from GSPMD](coming_from/gspmd.md)). Over an axis of `vmap` JAX makes other ops "
        "of them.",
    ),
    _ops(
        "create_linear pin unpin program_order run_scoped core_map",
        "Of refs and buffers that are not made by `jax.new_ref` inside the function; those become values.",
    ),
    _ops(
        "bitcast einshape_lo multiple_of reciprocal remove_memory_space roll",
        "They stand in the kernels of Pallas only.",
    ),
    _ops(
        "dim_as_value dimension_size shape_assertion",
        "Of shapes that are known only when an exported program is called.",
    ),
    _ops(
        "custom_lin unreachable",
        "They stand in JAX's own derivatives, and a derivative that is complete has none.",
    ),
    _ops(
        "global_array_to_host_local_array host_local_array_to_global_array",
        "They bring arrays from one process to all and back: that is done outside of programs.",
    ),
    _ops(
        "iota_2x32_shape to_edtype from_edtype empty2 after_all thunky.inline_constant",
        "They stand in lowered code only: no function that is traced has them.",
    ),
)
"""All of them, over both lines of JAX."""
