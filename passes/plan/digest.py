"""What a logical graph says, as a digest: the same in every process, and for equal programs only.

Names of values and lines of the user's program are left out: signatures do not depend on them.
"""

import dataclasses
import enum
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from sbp.passes.plan.candidates import OPAQUE
from sbp.passes.program.graph import Body, Const, Graph, Node, Operand
from sbp.rules.registry import USER

_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")
_PLAIN = (bool, int, str, bytes, type(None))


@dataclass(frozen=True)
class GraphDigest:
    """The digest of a graph.

    Arguments:
      text: in hexadecimal digits.
      exact: whether it says all. Of a function among an op's parameters it has only the name, which is enough
        where a rule of the user's speaks for the op.
    """

    text: str
    exact: bool


def digest_of(lines: Iterator[str]) -> str:
    """The digest of some lines of text."""
    found = hashlib.sha256()
    for line in lines:
        found.update(line.encode())
        found.update(b"\n")
    return found.hexdigest()


def graph_digest(graph: Graph) -> GraphDigest:
    """The digest of a graph; of scalars that stand in it, it says whether they are zero.

    >>> from sbp.passes.program.trace import trace
    >>> one, other = (trace(lambda x: x * k, [np.ones(3)], {}).graph for k in (2.0, 3.0))
    >>> graph_digest(one) == graph_digest(other)
    True
    """
    writer = _Writer(graph)
    return GraphDigest(digest_of(writer.lines()), writer.params.exact)


class ParamText:
    """Parameters of ops as text; `exact` becomes False once a text does not say all."""

    def __init__(self) -> None:
        self.exact = True
        self.known: dict[int, tuple[object, str]] = {}

    def of(self, x: object) -> str:
        """The text of a parameter."""
        if isinstance(x, _PLAIN):
            return repr(x)
        if id(x) not in self.known:  # the object is held, so that no other one gets its address
            self.known[id(x)] = x, self.new_text(x)
        return self.known[id(x)][1]

    def new_text(self, x: Any) -> str:
        """The text of a parameter that has not been seen."""
        name = f"{type(x).__module__}.{type(x).__qualname__}"
        for kinds, write in _WRITERS:
            if isinstance(x, kinds):
                return f"{name}({write(self, x)})"
        if callable(x) and not isinstance(x, type):
            self.exact = False
            return f"{name}({getattr(x, '__module__', '')}.{getattr(x, '__qualname__', '')})"
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            return f"{name}({self.each(getattr(x, f.name) for f in dataclasses.fields(x))})"
        text = repr(x)
        if _ADDRESS.search(text):
            self.exact = False
            text = _ADDRESS.sub("", text)
        return f"{name}({text})"

    def each(self, items: Iterator[object]) -> str:
        """Some parameters in a row."""
        return ", ".join(map(self.of, items))

    def mapping(self, x: Mapping[Any, object]) -> str:
        """A mapping, in an order that does not depend on how it was filled."""
        return ", ".join(sorted(f"{self.of(k)}: {self.of(v)}" for k, v in x.items()))


def _bytes(x: np.ndarray[Any, Any] | np.generic) -> str:
    return f"{x.dtype} {x.shape} {hashlib.sha256(x.tobytes()).hexdigest()}"


# The first that fits. A named tuple that holds functions, as a kind of random key does, is called by its tag.
_WRITERS: tuple[tuple[Any, Callable[[ParamText, Any], str]], ...] = (
    (enum.Enum, lambda to, x: str(x.name)),
    ((float, complex), lambda to, x: repr(x)),
    (np.dtype, lambda to, x: str(x)),
    ((np.ndarray, np.generic), lambda to, x: _bytes(x)),
    (jax.Array, lambda to, x: _bytes(np.asarray(x))),
    (Mapping, lambda to, x: to.mapping(x)),
    ((set, frozenset), lambda to, x: ", ".join(sorted(map(to.of, x)))),
    ((tuple, list), lambda to, x: repr(x.tag) if hasattr(x, "tag") else to.each(iter(x))),
)


def has_own_rule(node: Node) -> bool:
    """Whether the rule of an op is the user's: it says all that signatures depend on."""
    rule = node.rule
    made_by = str(getattr(rule and rule.rows, "__module__", ""))
    return rule is not None and (rule.family == USER or not made_by.startswith("sbp."))


class _Writer:
    """A graph, line by line: ids of values and of ops are positions already."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.params, self.own = graph, ParamText(), ParamText()

    def lines(self) -> Iterator[str]:
        g = self.graph
        yield from (f"{v.dtype}{list(v.shape)}" for v in g.values)
        yield f"inputs {list(g.inputs)} of which {len(g.consts)} are closed over"
        yield from self.nodes(g.nodes)
        yield f"outputs {self.operands(g.outputs)}"

    def nodes(self, nodes: Sequence[Node]) -> Iterator[str]:
        for node in nodes:
            given = {k: x is None if k in OPAQUE else x for k, x in node.params.items()}
            params = self.own if has_own_rule(node) else self.params
            yield (
                f"{node.op} {self.operands(node.inputs)} -> {list(node.outputs)} "
                f"{node.barrier} {params.mapping(given)}"
            )
            for body in node.bodies:
                yield from self.body(body)

    def body(self, body: Body) -> Iterator[str]:
        yield f"body {list(body.inputs)}"
        yield from self.nodes(body.nodes)
        yield f"gives {self.operands(body.outputs)}"

    def operands(self, operands: Sequence[Operand]) -> str:
        return " ".join(_scalar(x) if isinstance(x, Const) else str(x) for x in operands)


def _scalar(x: Const) -> str:
    return f"{'zero' if np.all(np.asarray(x.value) == 0) else 'scalar'}:{x.dtype}{list(x.shape)}"
