"""Which PTX instructions only some SMs have, as the PTX manual says under "Target ISA Notes".

Forms that every SM from 8.0 on has are not listed. The sets are written out: an SM that is not in one does not have the
instruction, whatever its number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_DATA_CENTRE_BLACKWELL = frozenset({100, 103})
_CONSUMER_BLACKWELL = frozenset({120, 121})
_BLACKWELL = _DATA_CENTRE_BLACKWELL | _CONSUMER_BLACKWELL
_HOPPER_ON = frozenset({90}) | _BLACKWELL
_ADA_ON = frozenset({89}) | _HOPPER_ON


@dataclass(frozen=True)
class InstructionForm:
    """Instructions that come and go together."""

    name: str
    pattern: re.Pattern[str]
    """Of the whole opcode, modifiers included."""
    sms: frozenset[int]
    operands: int | None = None
    """Number of operands, where the opcode alone does not identify the form."""

    def matches(self, opcode: str, num_operands: int) -> bool:
        return self.pattern.fullmatch(opcode) is not None and self.operands in (None, num_operands)


NVFP4_MMA = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
"""Four scales for each row and column: one for each 16 along k."""
_FORMS: tuple[tuple[Any, ...], ...] = (
    ("NVFP4 mma", re.escape(NVFP4_MMA), _CONSUMER_BLACKWELL),
    ("block-scaled mma", r"mma\.sync\.aligned\.\w+\.row\.col\.kind::\w+\.block_scale(\.[\w:]+)*", _CONSUMER_BLACKWELL),
    ("FP8 mma", r"mma\.sync\.aligned\.\w+\.row\.col\.f(16|32)\.e\dm\d\.e\dm\d\.f(16|32)", _ADA_ON),
    ("FP8 to f16", r"cvt\.rn(\.relu)?\.f16x2\.e(4m3|5m2)x2", _ADA_ON),
    ("float32 to FP8", r"cvt\.rn\.satfinite(\.relu)?\.e(4m3|5m2)x2\.f32", _ADA_ON),
    ("pairs of float32", r"(add|sub|mul|fma)(\.rn|\.rz|\.rm|\.rp)?(\.ftz)?\.f32x2", _BLACKWELL),
    ("float32 and a narrower number in one sum", r"(add|sub|fma)(\.rn)?(\.sat)?\.f32\.b?f16", _BLACKWELL),
    ("max or min of three", r"(max|min)(\.ftz)?(\.NaN)?(\.abs)?\.f32", _BLACKWELL, 4),
    ("sums and products of bf16", r"(add|sub|mul)(\.rn)?\.bf16(x2)?", _HOPPER_ON),
    ("comparison of bf16", r"setp\.\w+(\.\w+)?\.bf16", _HOPPER_ON),
    ("sums of two 16-bit integers", r"(add|min|max)(\.relu)?\.[su]16x2", _HOPPER_ON),
    ("stmatrix", r"stmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared(::cta)?\.b16", _HOPPER_ON),
    ("programmatic dependent launch", r"griddepcontrol\.\w+", _HOPPER_ON),
    ("bulk copies and their barriers", r"(cp[.\w]*\.bulk|mbarrier|fence\.proxy)[\w.:]*", _HOPPER_ON),
    ("clusters", r"(barrier\.cluster|mapa|getctarank)[\w.:]*", _HOPPER_ON),
    ("wgmma", r"(wgmma|setmaxnreg)\.[\w.:]+", frozenset({90})),
    ("tensor memory", r"tcgen05\.[\w.:]+", _DATA_CENTRE_BLACKWELL),
    ("E2M1, E3M2 and E2M3", r"cvt\.[\w.]*e(2m1|3m2|2m3)x2[\w.]*", _BLACKWELL),
    ("E8M0", r"cvt\.[\w.]*ue8m0x2[\w.]*", _BLACKWELL),
    ("256-bit loads and stores", r"(ld|st)\.[\w.:]*(v8\.\w32|v4\.\w64)", _DATA_CENTRE_BLACKWELL),
    ("reduction of float32 over a warp", r"redux\.sync\.(max|min)[\w.]*\.f32", _DATA_CENTRE_BLACKWELL),
)  # fmt: skip
FORMS = tuple(InstructionForm(name, re.compile(pattern), *rest) for name, pattern, *rest in _FORMS)


def form_of(opcode: str, num_operands: int) -> InstructionForm | None:
    """The form that this instruction has, if not every SM has it."""
    return next((form for form in FORMS if form.matches(opcode, num_operands)), None)


def lacked(opcode: str, num_operands: int, sm: int) -> InstructionForm | None:
    """The form of this instruction, if ``sm`` does not have it."""
    form = form_of(opcode, num_operands)
    return None if form is None or sm in form.sms else form


_PTX_SINCE = {90: (8, 0), 100: (8, 6), 103: (8, 8), 120: (8, 7), 121: (8, 8)}


def oldest_ptx(sm: int) -> tuple[int, int]:
    """The first version of PTX that knows ``target_name(sm)``."""
    return _PTX_SINCE.get(sm, (7, 8))


def target_name(sm: int) -> str:
    """What ``.target`` says for an SM, its own instructions included."""
    return f"sm_{sm}a" if sm in _HOPPER_ON else f"sm_{sm}"
