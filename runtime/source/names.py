"""What values are called: arguments by their paths, others as the user calls them, or by what makes them."""

from __future__ import annotations

import builtins
import keyword
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from sbp.passes.physical.program import Box, Step
from sbp.passes.program.graph import Const, Graph, Node, Source
from sbp.passes.program.names import Names
from sbp.passes.render.user_lines import name_at
from sbp.runtime.source.values import Eqn

RESERVED = frozenset(
    "jax jnp lax np sbp given Mesh PartitionSpec S B P MESH IN_SPECS OUT_SPECS on_shards extremum owned_sum "
    "all_product carry shards".split()
) | frozenset(dir(builtins))
_KINDS = {
    "all_gather": "whole",
    "all_reduce": "summed",
    "reduce_scatter": "scattered",
    "all_to_all": "swapped",
    "permute": "moved",
    "slice": "part",
    "fill": "part",
    "embed": "placed",
}
_OPS = {
    "dot_general": "product",
    "conv_general_dilated": "convolved",
    "reduce_sum": "total",
    "reduce_max": "highest",
    "reduce_min": "lowest",
    "select_n": "chosen",
    "max": "larger",
    "min": "smaller",
    "abs": "absolute",
    "pow": "power",
    "round": "rounded",
    "bitcast_convert_type": "bits",
    "random_split": "keys",
    "random_bits": "bits",
    "squeeze": "picked",
    "reshape": "reshaped",
    "integer_pow": "power",
    "pad": "padded",
    "sbp_add_rows": "added",
    "broadcast_in_dim": "spread",
    "convert_element_type": "cast",
    "dynamic_slice": "part",
    "dynamic_update_slice": "updated",
    "axis_index": "at",
    "transpose": "turned",
    "sbp_lookup": "rows",
    "sbp_sum_rows": "measure",
    "concatenate": "joined",
    "scan": "scanned",
    "while": "looped",
    "cond": "branch",
    "optimization_barrier": "held",
    "mul": "scaled",
    "add_any": "added",
    "add": "added",
    "sub": "difference",
    "div": "quotient",
    "gather": "picked",
    "lt": "mask",
    "ge": "mask",
    "le": "mask",
    "gt": "mask",
    "eq": "mask",
    "ne": "mask",
    "and": "mask",
    "psum": "summed",
    "all_gather ": "whole",
}
_WORDS = (
    ("part of the gradient of ", "grad_", "_part"),
    ("gradient of ", "grad_", ""),
    ("update of ", "update_", ""),
    ("new ", "new_", ""),
    ("sum of ", "sum_of_", ""),
)
_SENT = re.compile(
    r"(?:to|from) (?:stage|placement|another placement)[^:]*: (.*?)(?:, [^,]*:\d+)?(?: \(\d+\))?"
)
"""What a stage calls a tensor that goes to or comes from another one."""


def identifier(text: str) -> str:
    """A text as a name.

    >>> identifier("params['layers'][0]['w']"), identifier("opt_state[1].mu['lambda']"), identifier("lambda")
    ('params_layers_0_w', 'opt_state_1_mu_lambda', 'lambda_')
    """
    name = re.sub(r"\W+", "_", text).strip("_") or "value"
    name = name if not name[0].isdigit() else f"x{name}"
    return f"{name}_" if keyword.iskeyword(name) or name in RESERVED else name


def short_names(paths: Sequence[str]) -> list[str]:
    """Names of leaves: without the argument that they are of, where that leaves no doubt.

    >>> short_names(["params['w']", "params['b']", "x", "state.mu['w']", "state.nu['b']"])
    ['w', 'b', 'x', 'mu_w', 'nu_b']
    """
    whole = [identifier(p.partition(",")[0]) for p in paths]
    # Behind the argument there is an index or an attribute; a path may be a text of another kind.
    roots = [re.match(r"\w+(?=[\[.])", p) for p in paths]
    inner = [re.sub(r"^\[\d+\]", "", p[m.end() :]) if m else "" for p, m in zip(paths, roots, strict=True)]
    short = [
        identifier(rest) if re.search(r"[a-zA-Z_]", rest) else w for rest, w in zip(inner, whole, strict=True)
    ]
    counts = Counter(short) + Counter(set(whole) - set(short))
    return [s if counts[s] == 1 else w for s, w in zip(short, whole, strict=True)]


def common_name(names: Sequence[str]) -> str:
    """What equal things of several layers are called: without what tells one from the other.

    >>> common_name(["layers_0_norm_scale", "layers_1_norm_scale"]), common_name(["mu_0_bias", "mu_1_weight"])
    ('norm_scale', 'mu')
    >>> common_name(["drop", "x"])
    'x'
    """
    parts = [name.split("_") for name in names]
    if len(set(map(len, parts))) > 1:
        return names[-1]
    same = [len(set(column)) == 1 for column in zip(*parts, strict=True)]
    of_layer = [
        k + 1 < len(same) and not same[k + 1] and all(p[k + 1].isdigit() for p in parts)
        for k in range(len(same))
    ]
    words = parts[0]
    rest = [w for k, w in enumerate(words) if same[k] and not of_layer[k] and not w.isdigit()]
    kept = (
        rest
        if set(rest) - {"grad", "new"}
        else [w for k, w in enumerate(words) if same[k] and not w.isdigit()]
    )
    return "_".join(kept) or names[-1]


@dataclass(frozen=True)
class Hints:
    """What the values of a program may be called, before names are made unique.

    Arguments:
      graph: of the program.
      paths: the names of the leaves of arguments and results.
      steps: as they were traced.
      own: of values that are made together, the step of each.
    """

    graph: Graph
    paths: tuple[Sequence[str], Sequence[str]]
    steps: Sequence[tuple[Step, ...]]
    own: Mapping[int, int]

    @cached_property
    def names(self) -> Names:
        """What a reader of the plan calls tensors."""
        return Names(self.graph, *self.paths)

    @cached_property
    def arguments(self) -> list[str]:
        """Names of all that the program takes: the leaves, and the arrays that it closes over."""
        paths = list(self.paths[0])
        rest = len(self.graph.inputs) - len(paths)
        return short_names([*paths, *(f"constant_{k}" for k in range(rest))])

    @cached_property
    def _short(self) -> Mapping[str, str]:
        return dict(zip(self.paths[0], self.arguments, strict=False))

    def of_path(self, text: str) -> str:
        """The name of what the plan calls so; "" if it names no tensor of the user's."""
        for words, before, behind in _WORDS:
            if text.startswith(words):
                inner = self.of_path(text.removeprefix(words))
                return f"{before}{inner}{behind}" if inner else ""
        if text in self._short:
            return self._short[text]
        if (sent := _SENT.fullmatch(text)) is not None:
            return self.of_path(sent[1]) or identifier(sent[1])
        return self._results.get(text, "")

    @cached_property
    def _results(self) -> Mapping[str, str]:
        """Results are called as arguments are, where they are their next values."""
        short = {p: identifier(re.sub(r"^result(\[\d+\])*", "", p)) for p in self.paths[1]}
        known = set(self.arguments)
        return {p: f"new_{s}" if s in known else identifier(p) for p, s in short.items()}

    @cached_property
    def _values(self) -> Mapping[int, str]:
        """What the user calls the values that his lines make, by value id."""
        graph, phases = self.graph, self.names.phases
        nodes = [n for n in graph.walk() if n.source.file]
        line = {n.id: (n.source.file, n.source.line) for n in nodes}
        consumers = graph.consumers()
        found: dict[int, str] = {}
        runs: list[list[Node]] = []
        for node in nodes:
            if runs and line[runs[-1][-1].id] == line[node.id]:
                runs[-1].append(node)
            else:
                runs.append([node])
        results = {x for x in graph.outputs if not isinstance(x, Const)}
        for run in runs:
            name = name_at(run[0].source)
            if not name:
                continue
            inside = {n.id for n in run}
            forward = [n for n in run if phases[n.id] == "forward"]
            for node in reversed(forward):
                users = [u for u, _ in consumers.get(node.outputs[0], ()) if u.id not in inside]
                if node.outputs[0] in results or any(phases[u.id] == "forward" for u in users):
                    found[node.outputs[0]] = identifier(name)
                    break
        return found

    def value(self, v: int) -> str:
        """What a value of the graph is to the user; "" if nothing says."""
        return self.of_path(self.names.of(v)) or self._values.get(v, "")

    def name_of(self, v: int) -> str:
        """A name for a value, by what makes it if nothing else says."""
        return self.value(v) or self._weak(v)

    def of(self, eqn: Eqn, last: bool) -> tuple[str, bool]:
        """The name of what an equation makes, and whether it is the user's.

        Arguments:
          last: whether the step ends with it.
        """
        fallback = _OPS.get(eqn.name, identifier(eqn.name.replace("-", "_").removeprefix("sbp_")))
        own = [self.own[v.id] for v in eqn.outs if v.id in self.own]
        if eqn.step < 0 or (not own and len(self.steps[eqn.step]) > 1):
            return fallback, False
        step, last = self.steps[own[0] if own else eqn.step][0], last or bool(own)
        if isinstance(step, Box):
            base = self.name_of(step.value)
            suffix = _KINDS.get(step.move.kind, "")
            return (f"{base}_{suffix}" if suffix and last else fallback), last
        if not last:
            return fallback, False
        known = self.value(step.node.outputs[0]) if step.node.outputs else ""
        return (
            (known, not known.startswith("update_"))
            if known
            else (
                fallback
                if eqn.name != "sbp_named_call"
                else identifier(_OPS.get(step.node.op, step.node.op.removeprefix("sbp_").replace("-", "_"))),
                False,
            )
        )

    def _weak(self, v: int) -> str:
        node = self._producers.get(v)
        return "value" if node is None else _OPS.get(node.op, identifier(node.op.removeprefix("sbp_")))

    @cached_property
    def _producers(self) -> Mapping[int, Node]:
        return self.graph.producers()

    @cached_property
    def _nodes(self) -> Mapping[int, Node]:
        return {n.id: n for n in self.graph.walk()}

    def outputs(self, step: int) -> Sequence[int]:
        """The values of the graph that a step makes, in order; none of a move."""
        first = None if step < 0 else self.steps[step][0]
        return () if first is None or isinstance(first, Box) else first.node.outputs

    def phase(self, step: int) -> str:
        """ "forward", "backward" or "update"; "" if nothing says."""
        if step < 0:
            return ""
        first = self.steps[step][0]
        node = self._nodes.get(first.user) if isinstance(first, Box) else first.node
        if node is None and isinstance(first, Box):
            node = self._producers.get(first.value)
        return "" if node is None else self.names.phases.get(node.id, "")

    def source(self, step: int) -> Source:
        """The user's line."""
        if step < 0:
            return Source()
        first = self.steps[step][0]
        return first.source if isinstance(first, Box) else first.node.source

    def rows(self, step: int) -> tuple[str, ...]:
        """The rows of the plan that belong to the communication of a step."""
        return () if step < 0 else tuple(dict.fromkeys(r for s in self.steps[step] for r in s.rows))


@dataclass
class Unique:
    """Hands out names that differ.

    Arguments:
      names: names that are in use.
    """

    names: set[str]

    @classmethod
    def from_taken(cls, names: Iterable[str]) -> Unique:
        """Beside some names, and what the module itself uses."""
        return cls({*names, *RESERVED})

    def name(self, wanted: str) -> str:
        """The name, or the first free one that has a number behind it."""
        found, k = wanted, 1
        while found in self.names:
            k += 1
            found = f"{wanted}_{k}"
        self.names.add(found)
        return found
