"""What one kernel has to do, whatever the chip: bytes to and from memory, arithmetic, matrix products.

Operands and results of a fusion count by what is used of them: of what is only sliced or gathered the part
that is taken, of what is updated in place the update. A kernel reads nothing twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sbp.runtime.hlo.parser import Computation, Instruction, Module
from sbp.runtime.hlo.shapes import arrays, shape_bytes
from sbp.runtime.target.matmuls import MatrixProduct, products_of

FREE = frozenset(
    "parameter constant bitcast get-tuple-element tuple after-all partition-id replica-id opt-barrier "
    "optimization-barrier add-dependency domain get-dimension-size".split()
)
_MOVES = frozenset(
    "broadcast iota reshape transpose copy slice dynamic-slice dynamic-update-slice concatenate pad gather "
    "reverse dot convolution custom-call fusion call while conditional".split()
)
# Instructions of the vector units per element, one for what is not here: clock cycles that XLA has measured
# for float32 on an H100 (xla/service/gpu/model/hlo_op_profiles_data.h), in units of the 7 of an addition.
_OPERATIONS = {
    "divide": 3,
    "remainder": 6,
    "sqrt": 11,
    "rsqrt": 11,
    "exponential": 11,
    "exponential-minus-one": 27,
    "log": 24,
    "log-plus-one": 33,
    "logistic": 14,
    "tanh": 67,
    "erf": 67,
    "cbrt": 25,
    "atan2": 62,
    "power": 73,
    "sine": 137,
    "cosine": 140,
    "tan": 140,
}
# A radix sort reads its keys once to count, and reads and writes everything once per byte of the keys.
_SORTED = "sort"


@dataclass(frozen=True, slots=True)
class Work:
    """What one kernel does.

    Arguments:
      bytes: read from memory and written to it.
      operations: of the vector units, one per float32 addition.
      products: that the matrix units make.
      known: whether all of it was understood; of a library's call that is not known, only bytes are counted.
    """

    bytes: float = 0.0
    operations: float = 0.0
    products: tuple[MatrixProduct, ...] = ()
    known: bool = True

    @property
    def flops(self) -> float:
        """Of its matrix products."""
        return sum(product.flops for product in self.products)


def work_of(module: Module, computation: Computation, instruction: Instruction) -> Work:
    """The work of one instruction of a schedule, which is one kernel.

    Raises:
      HloTextError: for a shape of an unknown element type.
    """
    if instruction.opcode in FREE:
        return Work()
    used = _Use(module)
    operands = {
        name: computation.instructions[name]
        for name in instruction.operands
        if name in computation.instructions
    }
    fused = fused_computation(module, instruction)
    if fused is None:
        needs = used.reads(computation, instruction, 1.0, in_place=True)
        read = sum(needs.get(name, 0.0) * _itemsize(x) for name, x in operands.items())
        used.count(computation, instruction, _elements(instruction))
        written = _written(computation, instruction)
    else:
        taken = used.parameters(fused, 1.0, in_place=True)
        # One operand may stand for several parameters; it is read once.
        most: dict[str, float] = {}
        for position, name in enumerate(instruction.operands):
            most[name] = max(most.get(name, 0.0), taken.get(position, 0.0))
        read = sum(most[name] * _itemsize(x) for name, x in operands.items())
        written = _written(fused, fused.instructions[fused.root])
    return Work(read + written + used.sorted_bytes, used.operations, tuple(used.products), used.known)


def fused_computation(module: Module, instruction: Instruction) -> Computation | None:
    """What a fusion computes, also in its `-start` form; None for any other instruction."""
    if instruction.opcode.removesuffix("-start") != "fusion":
        return None
    return module.computations[instruction.called_computations("calls")[0]]


@dataclass(slots=True)
class _Use:
    """Walks a computation from its results back, with the elements of each value that somebody uses."""

    module: Module
    operations: float = 0.0
    sorted_bytes: float = 0.0
    known: bool = True
    products: list[MatrixProduct] = field(default_factory=list)

    def parameters(self, computation: Computation, share: float, *, in_place: bool) -> dict[int, float]:
        """Elements used of each parameter, by its position, if a share of each result is."""
        root = computation.instructions[computation.root]
        whole: dict[str, float] = {root.name: share * _elements(root)}
        sliced: dict[str, float] = {}
        taken: dict[int, float] = {}
        for x in reversed(computation.instructions.values()):
            need = min(_elements(x), max(whole.get(x.name, 0.0), sliced.get(x.name, 0.0)))
            if x.opcode == "parameter":
                taken[int(x.arguments[0])] = need
            elif need or x.name == root.name:
                self.count(computation, x, need)
                ends = in_place and _is_result(computation, x)
                part = need / max(1.0, _elements(x))
                for name, elements in self.reads(computation, x, part, in_place=ends).items():
                    if x.opcode in ("slice", "dynamic-slice", "gather"):
                        sliced[name] = sliced.get(name, 0.0) + elements  # each takes another part
                    else:
                        whole[name] = max(whole.get(name, 0.0), elements)
        return taken

    def reads(
        self, computation: Computation, x: Instruction, share: float, *, in_place: bool
    ) -> dict[str, float]:
        """Elements that an instruction uses of each operand, if a share of its result is used."""
        found = {
            name: computation.instructions[name] for name in x.operands if name in computation.instructions
        }
        sizes = {name: _elements(operand) for name, operand in found.items()}
        needs = {name: share * size if size > 1 else size for name, size in sizes.items()}
        names = x.operands
        match x.opcode:
            case "tuple":
                return dict(sizes)
            case "fusion" | "call":
                inner = self.module.computations[x.inner[0]]
                taken = self.parameters(inner, share, in_place=False)
                return {name: taken.get(i, 0.0) for i, name in enumerate(names) if name in sizes}
            case "slice" | "dynamic-slice" | "gather":
                needs[names[0]] = min(sizes[names[0]], share * _elements(x))
            case "broadcast":
                needs[names[0]] = min(sizes[names[0]], share * _elements(x))
            case "dynamic-update-slice":
                updated = sizes.get(names[1], 0.0)
                whole = _from_parameter(computation, names[0]) and in_place
                needs[names[0]] = 0.0 if whole else max(0.0, share * _elements(x) - updated)
                needs[names[1]] = updated
            case "scatter":
                count = len(names) // 2
                for target, update in zip(names[:count], names[count + 1 :], strict=True):
                    in_memory = _from_parameter(computation, target) and in_place
                    needs[target] = sizes[update] if in_memory else sizes[target]
                    needs[update] = sizes[update]
        return needs

    def count(self, computation: Computation, x: Instruction, need: float) -> None:
        """Adds the arithmetic of one instruction of which so many elements are used."""
        if x.opcode in FREE or x.opcode in ("fusion", "call"):
            return
        operands = [computation.instructions[name] for name in x.operands if name in computation.instructions]
        products = products_of(x, [array for operand in operands for array in arrays(operand.shape)[:1]])
        if products is not None:
            self.products += products
        elif x.opcode == "custom-call":
            self.known = False
        elif x.opcode in ("reduce", "reduce-window", "select-and-scatter"):
            share = need / max(1.0, _elements(x))
            window = x.opcode != "reduce"
            self.operations += (
                need * _window(x) if window else share * max(map(_elements, operands), default=0.0)
            )
        elif x.opcode == "scatter":
            self.operations += _elements(operands[-1])
        elif x.opcode == _SORTED:
            key = arrays(operands[0].shape)[0]
            width = key.bytes // max(1, key.elements)
            self.sorted_bytes += key.bytes + 2 * (width - 1) * sum(shape_bytes(o.shape) for o in operands)
        elif x.opcode not in _MOVES:
            self.operations += need * _OPERATIONS.get(x.opcode, 1)


def _window(x: Instruction) -> float:
    """Elements in the window of a reduce-window or select-and-scatter."""
    tokens = x.attributes.get("window", ())
    size = next((tokens[i + 2] for i, word in enumerate(tokens) if word == "size"), "1")
    product = 1.0
    for n in size.split("x"):
        product *= int(n)
    return product


def _elements(x: Instruction) -> float:
    """Of the largest array of a result."""
    return float(max((array.elements for array in arrays(x.shape)), default=0))


def _itemsize(x: Instruction) -> float:
    largest = max(arrays(x.shape), key=lambda a: a.elements, default=None)
    return largest.bytes / largest.elements if largest and largest.elements else 0.0


def _results(computation: Computation) -> Sequence[str]:
    root = computation.instructions[computation.root]
    return root.operands if root.opcode == "tuple" else [root.name]


def _is_result(computation: Computation, x: Instruction) -> bool:
    """Whether an instruction makes a result, perhaps seen in another shape."""
    return any(_behind(computation, name).name == x.name for name in _results(computation))


def _behind(computation: Computation, name: str) -> Instruction:
    """What a value is before it was only seen in other shapes."""
    x = computation.instructions[name]
    while x.opcode in ("bitcast", "reshape") and x.operands[0] in computation.instructions:
        x = computation.instructions[x.operands[0]]
    return x


def _from_parameter(computation: Computation, name: str) -> bool:
    """Whether a value lies in memory already, where it can be updated in place."""
    return name in computation.instructions and _behind(computation, name).opcode in (
        "parameter",
        "get-tuple-element",
        "copy",
        "custom-call",
        "fusion",
    )


def _written(computation: Computation, x: Instruction) -> float:
    """Bytes that a kernel writes of its results: of an update in place, the update."""
    names = x.operands if x.opcode == "tuple" else [x.name]
    total = 0.0
    for name in names:
        source = _behind(computation, name)
        updates: Mapping[str, int] = {"dynamic-update-slice": 1, "scatter": -1}
        if source.opcode in updates and _from_parameter(computation, source.operands[0]):
            total += shape_bytes(computation.instructions[source.operands[updates[source.opcode]]].shape)
        elif source.opcode != "parameter" or x.opcode != "tuple":
            total += shape_bytes(computation.instructions[name].shape)
    return total
