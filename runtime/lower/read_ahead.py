"""Keys that are sent a step ahead: what one device does of the next batch.

What comes of the keys goes from step to step as one more result, which is the next step's first argument
behind its own; behind it are the arrays of the next batch.
"""

from collections.abc import Hashable, Sequence

import jax

from sbp.compat.untyped import PyTree
from sbp.passes.physical.exchanges import ReadAhead, ids_of
from sbp.passes.physical.program import Physical, Version
from sbp.runtime.lower.device import Device, Env
from sbp.runtime.lower.local_kernels import send_keys


def received_keys(ahead: ReadAhead, sent: Sequence[PyTree]) -> dict[Hashable, PyTree]:
    """What came of the keys that the step before has sent, on this device."""
    return dict(zip(ahead.senders, jax.tree.map(lambda x: x[0], tuple(sent)), strict=True))


def sent_ahead(device: Device, ahead: ReadAhead, env: Env, following: Sequence[jax.Array]) -> PyTree:
    """Sends the keys of the next batch; what comes of them, with a dim for the devices in front.

    Arguments:
      env: has the inputs of the program.
      following: the arrays of the next batch.
    """
    physical = device.physical
    inner = {**env, **{input_version(physical, i): x for i, x in zip(ahead.inputs, following, strict=True)}}
    device.run(ahead.steps, inner)
    ops = []
    for step in ahead.senders.values():
        ids = {i: device.read(x, step.strategy.operands[i], inner) for i, x in ids_of(step)}
        operands = [ids.get(i) for i in range(len(step.node.inputs))]
        ops.append(device.local_op(step, operands, None, []))
    with device.mark(*ahead.senders.values()):
        sent = send_keys(ops)
    return tuple(jax.tree.map(lambda x: x[None], sent[keys]) for keys in ahead.senders)


def input_version(physical: Physical, i: int) -> Version:
    """An input as it lies."""
    return physical.graph.inputs[i], physical.inputs[i]
