"""How what devices send each other is spelled, barriers, and bodies that are called by their names."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sbp.annotation import Pin
from sbp.communication.protocol import Context
from sbp.layout import Layout
from sbp.runtime.source.operands import Operands, Spelling
from sbp.runtime.source.text import Text, literal, signature
from sbp.runtime.source.tracing import NamedCall


def _axes(names: Any) -> str:
    """Mesh axes: the name of one, or all of them."""
    every = (names,) if isinstance(names, str) else tuple(names)
    return f'"{every[0]}"' if len(every) == 1 else "(" + ", ".join(f'"{n}"' for n in every) + ")"


def _all(o: Operands) -> str:
    return o.arg(0) if len(o.texts) == 1 else f"({o.args()})"


def _reduce(o: Operands) -> Text | None:
    p = o.params
    if p.get("axis_index_groups") is not None or any(isinstance(a, int) for a in p["axes"]):
        return None
    # Of one operand the primitive, too, has a list of results: the function has none.
    return Text(f"lax.{o.eqn.name}({_all(o)}, {_axes(p['axes'])})")


def _grouped(o: Operands) -> bool:
    return o.params.get("axis_index_groups") is not None


def _all_gather(o: Operands) -> Text | None:
    p = o.params
    if _grouped(o):
        return None
    tiled = ", tiled=True" if p["tiled"] else ""
    return Text(
        f"lax.all_gather({o.arg(0)}, {_axes(p['axis_name'])}, axis={p['all_gather_dimension']}{tiled})"
    )


def _scatter(o: Operands) -> Text | None:
    p = o.params
    if _grouped(o):
        return None
    tiled = ", tiled=True" if p["tiled"] else ""
    dim = p["scatter_dimension"]
    return Text(f"lax.psum_scatter({o.arg(0)}, {_axes(p['axis_name'])}, scatter_dimension={dim}{tiled})")


def _all_to_all(o: Operands) -> Text | None:
    p = o.params
    if _grouped(o):
        return None
    dims = f"split_axis={p['split_axis']}, concat_axis={p['concat_axis']}"
    tiled = ", tiled=True" if p.get("tiled") else ""
    return Text(f"lax.all_to_all({o.arg(0)}, {_axes(p['axis_name'])}, {dims}{tiled})")


def _ppermute(o: Operands) -> Text:
    pairs = [tuple(map(int, pair)) for pair in o.params["perm"]]
    return Text(f"lax.ppermute({o.arg(0)}, {_axes(o.params['axis_name'])}, {pairs})")


def _axis_index(o: Operands) -> Text:
    return Text(f"lax.axis_index({_axes(o.params['axis_name'])})")


def _barrier(o: Operands) -> Text:
    return Text(f"lax.optimization_barrier({_all(o)})")


def _named_call(o: Operands) -> Text:
    call: NamedCall = o.params["call"]
    if not call.ops:
        rest = "".join(f", {literal(v, '', o.objects)}" for _, v in call.args)
        return Text(f"{call.function}({o.args()}{rest})")
    if len(call.ops) > 1:
        return Text(f"sbp.shards.run_together({', '.join(_shards_ops(o, call))})")
    ((name, ctx),) = call.ops
    params = "".join(f", {k}={literal(v, f'{name}_{k}', o.objects)}" for k, v in ctx.params.items())
    only = "[0]" if ctx.primitive.multiple_results and len(o.eqn.outs) == 1 else ""
    operands = o.args()
    given = f'"{name}", {operands}{", " if operands else ""}'
    return Text(f"sbp.shards.on_shards({given}{_lying(ctx)}{params}){only}")


def _shards_ops(o: Operands, call: NamedCall) -> Iterator[str]:
    """The ops that send together."""
    first = 0
    for name, ctx in call.ops:
        operands = ", ".join(o.arg(i) for i in range(first, first + len(ctx.operands)))
        params = ", ".join(f'"{k}": {literal(v, f"{name}_{k}", o.objects)}' for k, v in ctx.params.items())
        yield f'sbp.shards.ShardsOp("{name}", [{operands}], {_lying(ctx)}, params={{{params}}})'
        first += len(ctx.operands)


def _lying(ctx: Context) -> str:
    return f"takes={_layouts(ctx.operands)}, gives={_layouts(ctx.results)}"


def _layouts(layouts: Sequence[Layout]) -> str:
    shown = (f"({x.shape}, [{', '.join(map(signature, x.nd))}])" for x in layouts)
    return f"[{', '.join(shown)}]"


def _annotation(o: Operands) -> Text:
    """Of a program as its user has written it."""
    pin: Pin = o.params["pin"]
    said = pin.nd or pin.levels
    if pin.placement is not None or not said:  # by the names of axes, or for a placement of its own
        return Text(o.arg(0))
    shown = ", ".join("sbp.AUTO" if s is None else signature(s) for s in said)
    return Text(f"sbp.annotate({o.arg(0)}, [{shown}])")


COLLECTIVES: Mapping[str, Spelling] = {
    "psum": _reduce,
    "pmax": _reduce,
    "pmin": _reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
    "axis_index": _axis_index,
    "optimization_barrier": _barrier,
    "sbp_named_call": _named_call,
    "sbp_annotate": _annotation,
}
TALKING = frozenset(COLLECTIVES) - {"axis_index"}
"""What has a line of its own."""
