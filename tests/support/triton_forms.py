"""What a kernel leaves to Triton's compiler, read from the IR that the compiler gets: forms of ``triton_faults``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from triton._C.libtriton import ir, passes
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from microscale.hardware import WARP_SIZE
from microscale.hardware.triton_faults import TritonForm
from microscale.kernels.compiling.source import source as source_of
from microscale.kernels.launch import Kernel

E4M3, E2M1 = 0, 4
"""As ``tt.dot_scaled`` numbers its formats."""
ACCUMULATOR = 2
"""Which operand of a dot is added to: the first two are multiplied."""


def forms_of(kernel: Kernel, sm: int) -> frozenset[TritonForm]:
    """The forms that a kernel has. Gluon names its own instructions and layouts: none."""
    if kernel.fn.is_gluon():
        return frozenset()
    found = set(_asm_forms(_read(kernel, sm, inlined_only=True)))
    found |= set(_dot_forms(_read(kernel, sm), block_scaled="block_scale" in (kernel.promise or "")))
    return frozenset(found)


@dataclass(frozen=True)
class Op:
    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    ranks: tuple[int, ...]
    """Dimensions of each operand."""
    attributes: dict[str, Any]


@dataclass
class Graph:
    """Who computes a value from which others, and what loops carry."""

    ops: list[Op] = field(default_factory=list)
    made_by: dict[int, Op] = field(default_factory=dict)
    carried: dict[int, int] = field(default_factory=dict)
    """A value that a loop begins with → what its body hands to the next turn."""
    rank: dict[int, int] = field(default_factory=dict)

    def behind(self, value: int) -> set[int]:
        """Everything that a value is computed from, within one turn of its loop."""
        found, open_values = set(), [value]
        while open_values:
            at = open_values.pop()
            if at not in found:
                found.add(at)
                open_values += self.made_by[at].operands if at in self.made_by else ()
        return found

    @property
    def dots(self) -> list[Op]:
        return [op for op in self.ops if op.name in ("tt.dot", "tt.dot_scaled")]


def _read(kernel: Kernel, sm: int, inlined_only: bool = False) -> Graph:
    """The graph after Triton's own first passes, or as it was written, with its functions inlined."""
    target = GPUTarget("cuda", sm, WARP_SIZE)
    source, options = source_of(kernel, target)
    backend = make_backend(target)
    parsed = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(parsed)
    module = source.make_ir(target, parsed, functions, backend.get_module_map(), context)
    if inlined_only:
        manager = ir.pass_manager(context)
        passes.common.add_inliner(manager)
        manager.run(module, "inlined")
    else:
        stages: dict[str, Any] = {}
        backend.add_stages(stages, parsed, source.language)
        module = stages["ttir"](module, {})
    return _graph(module)


ATTRIBUTES = ("packed_element", "a_elem_type", "b_elem_type")
PACKED = ("lhs_k_pack", "rhs_k_pack")


def _graph(module: Any) -> Graph:
    graph = Graph()

    def add(op: Any) -> None:
        operands = [op.get_operand(at) for at in range(op.get_num_operands())]
        ids = tuple(value.id() for value in operands)
        ranks = tuple(_rank(value) for value in operands)
        graph.rank |= dict(zip(ids, ranks, strict=True))
        results = tuple(op.get_result(at).id() for at in range(op.get_num_results()))
        attributes = {name: op.get_int_attr(name) for name in ATTRIBUTES} | {n: op.get_bool_attr(n) for n in PACKED}
        found = Op(op.get_name(), ids, results, ranks, attributes)
        graph.ops.append(found)
        graph.made_by |= dict.fromkeys(results, found)
        if found.name == "scf.yield":
            block = op.get_block()
            arguments = [block.get_argument(at).id() for at in range(block.get_num_arguments())]
            # The body of a for loop: its counter, then what is carried. Branches of an if have no arguments.
            if len(arguments) == len(ids) + 1:
                graph.carried |= dict(zip(arguments[1:], ids, strict=True))

    module.walk(add)
    return graph


def _rank(value: Any) -> int:
    text = str(value.get_type())
    return text.partition("<")[2].count("x") if text.startswith("tensor") else 0


def _asm_forms(graph: Graph) -> Iterator[TritonForm]:
    for op in graph.ops:
        if op.name == "tt.elementwise_inline_asm" and (op.attributes["packed_element"] or 1) > 1:
            yield TritonForm.PACKED_ASM
            makers = {graph.made_by[value].name for value in op.operands if value in graph.made_by}
            if makers & {"tt.broadcast", "tt.splat", "arith.constant"}:
                yield TritonForm.PACKED_ASM_BROADCAST


def _dot_forms(graph: Graph, block_scaled: bool) -> Iterator[TritonForm]:
    for op in graph.dots:
        yield TritonForm.DOT if op.name == "tt.dot" else _scaled_form(op, block_scaled)
        if _chained(graph, op):
            yield TritonForm.CHAINED_DOTS
        if _recurrent(graph, op):
            yield TritonForm.RECURRENT_DOT


def _scaled_form(op: Op, block_scaled: bool) -> TritonForm:
    formats = {op.attributes["a_elem_type"], op.attributes["b_elem_type"]}
    if E2M1 in formats and not all(op.attributes[name] for name in PACKED):
        return TritonForm.SCALED_E2M1_MN
    if not block_scaled or formats not in ({E4M3}, {E2M1}):
        return TritonForm.SCALED_IN_BF16
    return TritonForm.SCALED_E4M3 if formats == {E4M3} else TritonForm.SCALED_E2M1


def _chained(graph: Graph, op: Op) -> bool:
    """It adds to what another dot gave, which began with what the loop carries, and the loop carries the sum on."""
    for first in graph.dots:
        if first is op or not set(first.results) & graph.behind(op.operands[ACCUMULATOR]):
            continue
        begins_with = graph.behind(first.operands[ACCUMULATOR]) & graph.carried.keys()
        if any(set(op.results) & graph.behind(graph.carried[value]) for value in begins_with):
            return True
    return False


def _recurrent(graph: Graph, op: Op) -> bool:
    """One of its factors comes from a matrix that the loop carries and some dot adds to."""
    factors = graph.behind(op.operands[0]) | graph.behind(op.operands[1])
    sums = {value for value in factors & graph.carried.keys() if graph.rank.get(value, 0) > 1}
    results = {result for dot in graph.dots for result in dot.results}
    return any(results & graph.behind(graph.carried[value]) for value in sums)
