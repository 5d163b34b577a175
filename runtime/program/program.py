"""`Program`: traced, planned and compiled on the first call per abstract signature, as jit."""

import functools
import operator
import os
from collections.abc import Callable, Collection
from dataclasses import replace

import jax

from sbp.compat.core import setting
from sbp.compat.errors import is_deleted
from sbp.compat.forks import check_not_forked
from sbp.compat.untyped import PyTree
from sbp.errors import ArgumentError, ProcessError, SbpError
from sbp.passes.explain.internal_errors import public
from sbp.passes.face import Plan
from sbp.passes.render.program_source import ProgramSource
from sbp.runtime.ahead_of_time.program import domain_devices, lowered_for, report_of_stages
from sbp.runtime.call import arguments
from sbp.runtime.call.binding import Call
from sbp.runtime.call.usage_errors import for_one_process, not_planned
from sbp.runtime.compile.compilation import Compilation, P, R
from sbp.runtime.compile.traced_call import TracedCall
from sbp.runtime.execute.compiled_program import CompiledProgram
from sbp.runtime.execute.memory_errors import check_memory, memory_explained
from sbp.runtime.execute.program_check import explain
from sbp.runtime.lower.key_counts import KeyCount
from sbp.runtime.nan_checks import findings
from sbp.runtime.pipeline.program import CompiledPipeline, many_programs
from sbp.runtime.processes.addressable import with_own_rows
from sbp.runtime.processes.process_group import process_group
from sbp.runtime.profile.pipeline import measure
from sbp.runtime.profile.profile import Profile
from sbp.runtime.report.report import ProgramReport, report_of
from sbp.runtime.saved.save import SavedSignature, save, signature_of
from sbp.runtime.target.devices import chip_of


class Program(Compilation[P, R]):
    """A distributed program; call it like the function it was made from. Made by `sbp.compile`.

    A type checker sees the function's parameters and result in a call. It does not check the arguments of
    `plan` and `lower`, which may be shapes, nor those of `place`.
    """

    @public
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the program on logical arrays; host arrays are placed.

        Raises:
          SbpError: for arguments, signatures or annotations that cannot be taken, all of them at once.
        """
        call = self.parameters.take(args, kwargs)
        built = self._to_run(call)
        if self._next is not None:
            self._announce(call, built)
        try:
            run: Callable[..., R] = built.run
            if any(map(setting, findings.SETTINGS)):  # JAX would look for itself, and know no line
                with jax.debug_nans(False), jax.debug_infs(False):
                    return run(call.leaves)
            return run(call.leaves)
        except (RuntimeError, ValueError) as e:
            if not isinstance(e, SbpError):
                check_memory(e, built)
                if is_deleted(e):
                    self._check(call, True)  # of JAX: which argument it is
                explain(e)
            raise

    @public
    def read_ahead(self, *args: PyTree, **kwargs: PyTree) -> None:
        """Announces the arguments of the call behind the next one, whose keys the next one then sends.

        With `ExchangeOptions(prefetch=True)`; otherwise nothing is done. Results are the same either way.

        Arguments:
          args, kwargs: as of a call, the very arrays; None for arguments that are not known yet, such as the
            parameters that the next call gives.

        >>> import jax.numpy as jnp
        >>> import sbp
        >>> ahead = sbp.Options(exchange=sbp.options.ExchangeOptions(prefetch=True))
        >>> one = sbp.placement("cpu", shape=(1,))
        >>> look_up = sbp.compile(lambda table, ids: table[ids], one, options=ahead)
        >>> batches = [jnp.array([1, 2]), jnp.array([0, 1])]
        >>> look_up.read_ahead(None, batches[1])
        >>> look_up(jnp.eye(3), batches[0]).tolist()
        [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
        """
        if self.options.exchange.prefetch:
            self._next = args, kwargs

    def _announce(self, call: Call, built: CompiledProgram | CompiledPipeline) -> None:
        """Tells a program of the call behind this one, if that is a call of the same program."""
        assert self._next is not None
        (args, kwargs), self._next = self._next, None
        filled = [x if given is None else given for given, x in zip(args, call.args, strict=False)]
        more = {k: call.kwargs.get(k) if x is None else x for k, x in kwargs.items()}
        following = self.parameters.take((*filled, *call.args[len(filled) :]), {**call.kwargs, **more})
        alike = following.tree == call.tree and all(
            map(operator.eq, map(arguments.abstract, following.leaves), map(arguments.abstract, call.leaves))
        )
        keys = built.keys_ahead if isinstance(built, CompiledProgram) else None
        if alike and keys is not None:
            keys.announce(following.leaves)

    @public
    def place(self, *args: PyTree, own_rows: int | Collection[int] = ()) -> tuple[PyTree, ...]:
        """Moves the arguments of a call to the shardings of the program; calls then move nothing.

        Arguments:
          own_rows: positions of arguments of which every process gives only its own rows. The argument is all
            rows, in the order of the processes.

        Raises:
          SbpError: as a call does.

        >>> import jax.numpy as jnp
        >>> import sbp
        >>> double = sbp.compile(lambda x: x * 2, sbp.placement("cpu", shape=(1,)))
        >>> (x,) = double.place(jnp.ones(2))
        >>> x.committed
        True
        """
        owned = {own_rows} if isinstance(own_rows, int) else {*own_rows}
        args = tuple(
            with_own_rows(x, self.placement, f"argument {i}") if i in owned else x for i, x in enumerate(args)
        )
        call = self.parameters.take(args, {})
        built = self._to_run(call)
        with memory_explained(built):
            placed = built.place(call.leaves)
        return tuple(call.full(jax.tree.unflatten(call.tree, placed)[0]))

    @public
    def save_executable(self, path: str | os.PathLike[str], *args: PyTree, **kwargs: PyTree) -> None:
        """Writes the compiled program to a file for `sbp.load_executable`, which compiles nothing.

        The file works only on the same devices with the same versions. Each process writes its own.

        Arguments:
          path: of the file; with several processes the number of the process is appended.
          args, kwargs: arrays or `ShapeDtypeStruct`s of the arguments; without any, those of the last call.

        Raises:
          ExecutableError: for programs that call the host, and files that cannot be written.
          SbpError: as a call does.

        >>> import tempfile, jax.numpy as jnp
        >>> import sbp
        >>> double = sbp.compile(lambda x: x * 2, sbp.placement("cpu", shape=(1,)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     double.save_executable(f"{folder}/double.sbpx", jnp.ones(2))
        """
        if args or kwargs:
            self._prepare(args, kwargs)
        if self._latest is None:
            raise ArgumentError(not_planned(self, "save_executable(path)"))
        call, built, avals = self._latest
        name, takes = getattr(self.fn, "__name__", "program"), signature_of(self.fn)
        signature = SavedSignature(name, takes, self.parameters, built.plan.placement, call, avals)
        save(path, signature, built, self.options.signing_key)

    @property
    def abstract_args(self) -> tuple[PyTree, ...]:
        """The positional arguments as `jax.ShapeDtypeStruct`s with their shardings, of what was planned last.

        Raises:
          ArgumentError: if nothing was planned yet.
        """
        call, (given, _) = self._ends("abstract_args")
        return tuple(call.full(jax.tree.unflatten(call.tree, given)[0]))

    @property
    def in_shardings(self) -> tuple[PyTree, ...]:
        """The shardings of the positional arguments, as `NamedSharding`s; see `abstract_args`."""
        call, (given, _) = self._ends("in_shardings")
        return tuple(call.full(jax.tree.unflatten(call.tree, [x.sharding for x in given])[0]))

    @property
    def out_shardings(self) -> PyTree:
        """The shardings of the results, as `NamedSharding`s; see `abstract_args`."""
        _, (_, made) = self._ends("out_shardings")
        assert self._latest is not None
        return jax.tree.unflatten(self._latest[1].traced.out_tree, [x.sharding for x in made])

    def _ends(self, what: str) -> tuple[Call, tuple[list[jax.ShapeDtypeStruct], list[jax.ShapeDtypeStruct]]]:
        """Arguments and results of what was planned last, and of which call that was."""
        if self._latest is None:
            raise ArgumentError(not_planned(self, what))
        call, built, _ = self._latest
        return call, built.ends

    def key_counts(self) -> tuple[KeyCount, ...]:
        """The keys of each sparse exchange, counted if `ExchangeOptions(count_keys=True)`.

        Exchanges inside loops are not counted.
        """
        return tuple(c for b in self._built.values() if b.key_counts is not None for c in b.key_counts.read())

    @public
    def plan(self, *args: PyTree, **kwargs: PyTree) -> Plan:
        """The plan for these arguments, arrays or `ShapeDtypeStruct`s; needs no devices.

        Raises:
          SbpError: as a call does.
        """
        built = self._prepare(args, kwargs)[1]
        if not built.moved_leaves:
            return built.plan
        return replace(
            built.plan, notes=(*built.plan.notes, *(f"{m}: moved" for m in built.moved_leaves.values()))
        )

    @public
    def source(self, *args: PyTree, **kwargs: PyTree) -> ProgramSource:
        """The program for these arguments as a Python module, `plan(...).source()`; needs no devices.

        Raises:
          SbpError: as a call does; for programs with stages, each of which has its own.
        """
        return self.plan(*args, **kwargs).source()

    @public
    def trace(self, *args: PyTree, **kwargs: PyTree) -> TracedCall:
        """The function, traced for these arguments, to plan it for several placements.

        Raises:
          SbpError: as a call does.
        """
        call = self.parameters.take(args, kwargs)
        self._check(call, False)
        return self._read(call, tuple(map(arguments.abstract, call.leaves)))

    @public
    def profile(self, *args: P.args, **kwargs: P.kwargs) -> Profile:
        """Runs some steps with these arguments and measures them. Donated arguments are copied first.

        For a program of one placement, JAX's profiler divides a step into kernels by line, collectives,
        waiting for other devices, and the rest, beside the plan's estimates. For a program with stages and
        micro-batches every action is measured. `key_counts` includes these steps.

        Raises:
          SbpError: as a call does.
        """
        if process_group() is not None:
            raise ProcessError(for_one_process(self, "profile"))
        call, built = self._prepare(args, kwargs, concrete=True)
        with memory_explained(built):
            return measure(built, call.leaves)

    @public
    def lower(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Lowered:
        """The lowered program, as `jax.stages.Lowered`.

        Its `compile()` also works for GPUs that are not here, if JAX's CUDA plugin is installed (the extra
        `gpu-target`; no GPU, driver or CUDA library). Such an executable can be read, but not run.

        Raises:
          SbpError: as a call does. Its `compile()` raises PlacementError if there is no such plugin.
        """
        call, built = self._prepare(args, kwargs)
        if isinstance(built, CompiledPipeline):
            raise ArgumentError(many_programs(self, "lower"))
        physical = built.plan.physical
        assert physical is not None
        avals = [arguments.struct(arguments.abstract(x)) for x in (*call.leaves, *physical.graph.consts)]
        return lowered_for(built, built.plan.placement, self.options.topology, avals)

    @public
    def report(self, *args: PyTree, **kwargs: PyTree) -> ProgramReport:
        """Compiles the program for these arguments, and compares the result with the plan.

        The report has every collective of the plan with its instructions, the bytes and memory of both, and
        for GPUs, which need not be here, the simulated step. For a program with stages it is a
        `PipelineReport`: what each stage's pieces need, and what is sent between them.

        Raises:
          SbpError: as a call does; PlacementError if it cannot be compiled here.
        """
        check_not_forked(f"{self}.report(...)")
        built = self._prepare(args, kwargs)[1]
        if isinstance(built, CompiledPipeline):
            return report_of_stages(built, built.plan.placement, self.options.topology)
        return self.report_of(self.lower(*args, **kwargs).compile(), *args, **kwargs)

    @public
    def report_of(self, compiled: jax.stages.Compiled, *args: PyTree, **kwargs: PyTree) -> ProgramReport:
        """The report for the result of `lower(*args, **kwargs).compile(...)`, with your own XLA options.

        Raises:
          SbpError: as a call does.
        """
        plan = self.plan(*args, **kwargs)
        if plan.stages:
            raise ArgumentError(many_programs(self, "report_of"))
        lowered = functools.partial(self.lower, *args, **kwargs)
        domain = domain_devices(self.placement, self.options.topology)
        chip = chip_of(self.placement)
        return report_of(plan, compiled, chip, lambda: lowered().as_text(debug_info=True), domain)

    def raise_known(self, error: BaseException) -> None:
        """Explains an error that came while results of the last call were read, if the plan knows more.

        Raises:
          MemoryLimitError: if there was too little memory.
        """
        if self._latest is not None:
            check_memory(error, self._latest[1])
