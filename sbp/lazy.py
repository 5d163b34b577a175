"""`rows`: an optimizer that updates the rows of a table that the batch has touched, and leaves the others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sbp.compat import core
from sbp.compat.untyped import PyTree, TreeDef
from sbp.errors import ArgumentError, Problem

NAME = "sbp_rows"
WHOLE = "the whole table is updated"
"""What a note and a warning say of a step that is not on rows alone."""
DENSE = ("note", "error")


class Transformation(NamedTuple):
    """An optimizer in the manner of optax: `init(params)`, and `update(grads, state, params)`."""

    init: Callable[[PyTree], PyTree]
    update: Callable[..., tuple[PyTree, PyTree]]


class Optimizer(Protocol):
    """What `rows` takes: any optimizer of this form, of whatever library."""

    @property
    def init(self) -> Callable[..., PyTree]:
        """From parameters to its state."""

    @property
    def update(self) -> Callable[..., tuple[PyTree, PyTree]]:
        """From gradients, state and parameters to what is added to the parameters, and the new state."""


@dataclass(frozen=True)
class Update:
    """One step of the inner optimizer on the leaves of one parameter.

    Arguments:
      run: the inner optimizer's `update`.
      tree: of its state.
      has_param: whether the parameter itself is given.
      strict: whether a step on the whole parameter is an error.
    """

    run: Callable[..., tuple[PyTree, PyTree]]
    tree: TreeDef
    has_param: bool
    strict: bool = False

    def __call__(self, grad: jax.Array, *rest: jax.Array) -> list[jax.Array]:
        """What is added to the parameter, then the leaves of the new state.

        Arguments:
          grad: the gradient.
          rest: the leaves of the state, then the parameter if there is one.
        """
        leaves, param = (rest[:-1], rest[-1]) if self.has_param else (rest, None)
        added, state = self.run(grad, jax.tree.unflatten(self.tree, leaves), param)
        return [added, *self.tree.flatten_up_to(state)]


def by_row(leaf: Sequence[int], param: Sequence[int]) -> bool:
    """Whether a leaf of the state has a line per row of the parameter, by their shapes.

    >>> by_row((5, 1), (5, 3)), by_row((), (5, 3))
    (True, False)
    """
    return bool(leaf and param) and leaf[0] == param[0]


def dense(grad: jax.Array, *rest: jax.Array, update: Update) -> list[jax.Array]:
    """What `rows` means: the inner step, and of its results the rows whose gradient is not all zero."""
    old = rest[: update.tree.num_leaves]
    added, *new = update(grad, *rest)
    touched = jnp.any(grad != 0, axis=tuple(range(1, grad.ndim)))

    def chosen(after: jax.Array, before: jax.Array) -> jax.Array:
        return jnp.where(touched.reshape(touched.shape + (1,) * (after.ndim - touched.ndim)), after, before)

    kept = [chosen(n, o) if by_row(o.shape, grad.shape) else n for n, o in zip(new, old, strict=True)]
    return [chosen(added, jnp.zeros((), added.dtype)), *kept]


rows_p = core.make_op(NAME, dense)


def rows(tx: Optimizer, *, dense: str = "note") -> Transformation:
    """Makes an optimizer lazy: rows whose gradient is all zero keep their values and their state.

    On one device this is `where(any(grad != 0, -1), new, old)`, for the parameter and for every leaf of the
    state with one entry per row. If the gradient of a table comes only from lookups, the compiler never
    builds it. It sends the rows of the batch to the devices that own them and updates only those. This needs
    an optimizer that treats every row by itself and whose result is added to the table. If that is not so,
    the plan says why, Python warns once, and the program computes the formula above.

    Arguments:
      tx: an optimizer with `init` and `update`, of optax or of your own; it sees one parameter at a time.
      dense: what to do if a step needs the whole table. "note": a note of the plan and a warning say why.
        "error": compiling the program raises an error that says why. Functions that are not compiled by sbp
        run in any case.

    Raises:
      ArgumentError: if `tx` has no `init` and `update`, or for another `dense`.

    Source: the sparse part of Adam, "lazy", as fused embedding optimizers have it.

    >>> import optax
    >>> tx, table = rows(optax.sgd(1.0)), jnp.ones((3, 2))
    >>> added, _ = tx.update(jnp.array([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]]), tx.init(table), table)
    >>> added.tolist()
    [[0.0, 0.0], [-1.0, -2.0], [0.0, 0.0]]
    """
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise ArgumentError(_no_optimizer(tx))
    if not (isinstance(dense, str) and dense in DENSE):
        raise ArgumentError(_no_way(dense))

    def init(params: PyTree) -> PyTree:
        return jax.tree.map(tx.init, params)

    def update(grads: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        leaves, structure = jax.tree.flatten(grads)
        tree: TreeDef = structure
        states = tree.flatten_up_to(state)
        given = [None] * len(leaves) if params is None else tree.flatten_up_to(params)
        strict = dense == "error"
        done = [_step(tx, strict, g, s, p) for g, s, p in zip(leaves, states, given, strict=True)]
        added, new = (jax.tree.unflatten(tree, [d[i] for d in done]) for i in (0, 1))
        return added, new

    return Transformation(init, update)


def _step(
    tx: Optimizer, strict: bool, grad: ArrayLike, state: PyTree, param: ArrayLike | None
) -> tuple[jax.Array, PyTree]:
    """One parameter's part of the update, as one op."""
    leaves, tree = jax.tree.flatten(state)
    operands: Sequence[ArrayLike] = [grad, *leaves, *([] if param is None else [param])]
    update = Update(tx.update, tree, param is not None, strict)
    out = rows_p.bind(*map(jnp.asarray, operands), update=update)
    return out[0], jax.tree.unflatten(tree, out[1:])


def _no_optimizer(tx: object) -> Problem:
    return Problem(
        "argument",
        "sbp.rows(tx)",
        f"a {type(tx).__name__}",
        "an optimizer with init(params) and update(grads, state, params)",
        "a lazy optimizer is made from an ordinary one",
        "sbp.rows(optax.adagrad(0.05))",
    )


def _no_way(dense: object) -> Problem:
    return Problem(
        "argument",
        "sbp.rows(tx, dense=...)",
        f"{dense!r:.60}",
        " or ".join(map(repr, DENSE)),
        "it says what to do if a step needs the whole table",
        'dense="error" to be told of it',
    )
