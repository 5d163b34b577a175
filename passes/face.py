"""`Plan`: what the compiler has found out, with every way to show it; `load_plan` reads it again.

Plans are data (`explain/plan.py`); `render/` makes texts, pages, pictures and files of
them. Here both are put together, so that neither needs the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from jax.sharding import PartitionSpec

from sbp.errors import ArgumentError, Problem, SignatureError
from sbp.notation.suggestions import suggestion
from sbp.passes.explain.choices import RowChoices, TensorChoices
from sbp.passes.explain.constraint_gaps import ConstraintGap, constraint_gaps
from sbp.passes.explain.internal_errors import public
from sbp.passes.explain.plan import PlanData, Replans, Writes
from sbp.passes.explain.words import MAX_ROWS
from sbp.passes.render import files, page, text
from sbp.passes.render.diff import diff_text
from sbp.passes.render.page_data import row_key
from sbp.passes.render.program_source import ProgramSource
from sbp.passes.render.shardings import shardings_of
from sbp.passes.render.web_page import PageProfile
from sbp.signature import NdSbp, Signature, is_signature

CHOICES = 4
"""Alternatives that `Plan.why` shows."""
CHOICES_SECONDS = 10.0
"""How long `Plan.why` looks for them."""
PAGE_CHOICES, PAGE_ALTERNATIVES = 5, 3
"""Collectives of whose tensors a page has alternatives, and how many of these."""
PAGE_SECONDS = 10.0
"""How long is looked for them."""
MOST_OPS = 5_000
"""Of a program that is looked at without being asked: building the search of larger ones takes longer."""


@dataclass(frozen=True, repr=False)
class Plan(PlanData):
    """What a program will do, and why; `print` shows it, `repr` is one line."""

    def __str__(self) -> str:
        return text.plan_text(self)

    def __repr__(self) -> str:
        return text.plan_line(self)

    def text(self, *, by_time: bool = True, rows: float = MAX_ROWS) -> str:
        """What `print` shows, with other rows.

        Arguments:
          by_time: whether the costliest collective comes first; else they are in order of execution.
          rows: how many rows the table has at the most; `math.inf` for all.
        """
        return text.plan_text(self, how=text.Shown(by_time, rows))

    def _repr_html_(self) -> str:
        return page.plan_html(self)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        choices: int | None = None,
        time_limit: float = PAGE_SECONDS,
        profile: PageProfile | None = None,
    ) -> None:
        """Writes the plan as .json, .html, .dot or .svg; with stages also as .trace.json; without stages also
        as .py, a module of PartitionSpecs for `jax.jit`.

        Arguments:
          choices: for how many of the costliest collectives a page lists other signatures of their tensors,
            with the cost of the whole plan then, and whether the collective would be gone. By default five,
            in programs of at most 5,000 ops.
          time_limit: seconds for finding these. For the others the page says how to call `why`.
          profile: from `Program.profile` of the same program; a page shows its times beside the estimates.

        Raises:
          ArgumentError: for another suffix, and for a profile of another program.
        """
        files.save_plan(self, path, self._choices(path, choices, time_limit), profile)

    def __reduce__(self) -> tuple[Callable[[str], Plan], tuple[str]]:
        """A plan is pickled as it is saved: without the program, which cannot leave its process."""
        return read_text, (files.plan_json(self),)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        """Itself, as of anything that cannot be changed."""
        return self

    def _choices(
        self, path: str | os.PathLike[str], most: int | None, time_limit: float
    ) -> dict[str, RowChoices]:
        """What the tensors of the costliest collectives could lie as, by the keys of their rows.

        Arguments:
          most: of how many; None for as many as there is time for, in programs that are not too large.
        """
        if self.replanner is None or not os.fspath(path).endswith(".html"):
            return {}
        if most is None and self._ops > MOST_OPS:
            return {}
        wanted = PAGE_CHOICES if most is None else most
        rows = sorted((c for c, _ in self.merged_collectives()), key=lambda c: c.cost, reverse=True)[:wanted]
        if not rows:
            return {}
        found = self.replanner.rows_choices(self, rows, PAGE_ALTERNATIVES, time_limit)
        return {row_key(c): choices for c, choices in found}

    @property
    def _ops(self) -> int:
        """How many ops the program has, those of bodies counted."""
        return sum(1 for p in self.parts if p.physical is not None for _ in p.physical.walk())

    def why(self, tensor: str, *, most: int = CHOICES, time_limit: float = CHOICES_SECONDS) -> TensorChoices:
        """Which other signatures a tensor could have, and what the whole plan would cost then.

        Each alternative is the cheapest plan with that signature, with everything else planned again; what
        the user fixed stays fixed. `print` shows them.

        Arguments:
          tensor: an argument's or a result's path (`params['w']`, `[*]` for all of a list), a line
            (`gpt.py:150`), an op at a line (`dot_general at gpt.py:150`), or a name that the plan prints.
          most: how many alternatives, the cheapest first.
          time_limit: seconds for all searches together.

        Raises:
          ArgumentError: for a name that means no tensor or several kinds of tensors, and for a plan without
            its program.
        """
        return self._replanner("why").choices(self, tensor, most, time_limit)

    def what_if(self, tensor: str, signature: Signature | Sequence[Signature]) -> Plan:
        """The plan in which a tensor has a given signature, with everything else planned again.

        `plan.diff(plan.what_if(...))` shows the differences; the first note of the new plan shows the cost.

        Arguments:
          tensor: its name, as for `why`. For the result of an op this is an `sbp.annotate` behind the op.
          signature: one `S(dim)`, `B` or `P` per placement axis.

        Raises:
          ArgumentError: as `why` does.
          SbpError: for a signature that the tensor cannot have.
        """
        held = with_forms(self._replanner("what_if").hold(self, tensor, _signature(tensor, signature)))
        return with_writer(held, self.parts[0].writer, self.writer)

    def source(self) -> ProgramSource:
        """The program as a Python module that runs: a `shard_map` function with explicit collectives.

        `print` shows it, `save` writes it, `load` returns its function (docs/source.md).

        Raises:
          ArgumentError: for a plan without its program, and for stages that are cut out of a scan: each of
            these has its own.

        >>> import jax, sbp
        >>> double = sbp.compile(lambda x: 2.0 * x, sbp.placement("cpu", shape=(2,), axes=("data",)))
        >>> source = double.plan(jax.ShapeDtypeStruct((4,), "float32")).source()
        >>> [line.strip() for line in source.text.splitlines() if "= 2.0 * x" in line]
        ['result = 2.0 * x  # float32[2] [S(0)]']
        """
        if self.writer is None:
            raise self._without_program("source")
        written: ProgramSource = self.writer(self)
        return written

    @property
    def shardings(self) -> Mapping[str, PartitionSpec]:
        """The shardings of arguments and results, by their names."""
        return shardings_of(self)

    @property
    def constraint_gaps(self) -> tuple[ConstraintGap, ...]:
        """What `sbp.constrain` cannot express in JAX, with its cost; empty for a plan from a file."""
        return constraint_gaps(self)

    def diff(self, other: Plan) -> str:
        """The differences from this plan to another one, as text."""
        return diff_text(self, other, ("this", "other"))

    def _replanner(self, asked: str) -> Replans:
        if self.replanner is not None:
            return self.replanner
        raise self._without_program(asked)

    def _without_program(self, asked: str) -> ArgumentError:
        got = f"a plan of {self.name!r} without its program"
        legal = "the plan of a program, as Program.plan(...) returns it"
        why = "it was loaded or unpickled, or is of one placement of many: it does not have the function"
        fix = f"sbp.compile(fn, placement, ...).plan(*args).{asked}(...)"
        return ArgumentError(Problem("argument", f"Plan.{asked}", got, legal, why, fix))


def _signature(tensor: str, given: object) -> NdSbp:
    """An N-D signature as it was given.

    Raises:
      SignatureError: for anything else.
    """
    nd = [given] if is_signature(given) else given
    if isinstance(nd, list | tuple) and nd and all(map(is_signature, nd)):
        return tuple(nd)
    why, fix = suggestion(given) or ("it is no signature", "[S(0), B]")
    legal = "S(dim), B or P, or a list of them, one per placement axis"
    raise SignatureError(Problem("signature", f"Plan.what_if({tensor!r}, ...)", repr(given), legal, why, fix))


def with_forms(plan: PlanData) -> Plan:
    """The plan with its ways to be shown, those of its stages too."""
    if isinstance(plan, Plan):
        return plan
    # Field by field, without a copy: the program inside may be large.
    given: dict[str, Any] = {f.name: getattr(plan, f.name) for f in fields(plan)}
    return Plan(**given | {"stages": tuple(map(with_forms, plan.stages))})


def with_writer(plan: Plan, writer: Writes | None, of_stages: Writes | None = None) -> Plan:
    """A plan that can be written as Python; of a program with stages each of these can.

    Arguments:
      of_stages: of a program with stages, who writes all of it.
    """
    stages = tuple(replace(p, writer=writer) for p in plan.stages)
    return replace(plan, stages=stages, writer=of_stages if stages else writer)


def read_text(text: str) -> Plan:
    """The plan of a text that JSON files and pickled plans hold.

    Raises:
      ArgumentError: as `load_plan` does.
    """
    return with_forms(files.parse_plan(text, "unpickling a plan"))


@public
def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan that was saved as .json; its `physical` is None.

    Raises:
      ArgumentError: if the file holds no plan, or one of a version that is not known.
    """
    return with_forms(files.load_plan(path))
