"""Spelling of vector operations in C.

Owns the spelling of each operation of `expr_ops.OPS` for GNU vectors and for single
numbers; an instruction set whose vectors are neither, or that has a faster spelling,
has it in its file (`target.vector_ops.Lanes`). In the texts {d} is written, {a}, {b}, {c}
are read, {R}, {W} and {U} are the types of vectors of f32, of s32 and of u32, {T} that of
the result.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from portmm.spec.epilogue import shortest

if TYPE_CHECKING:
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

_VECTOR = {
    "add": "{d} = {a} + {b};",
    "sub": "{d} = {a} - {b};",
    "mul": "{d} = {a} * {b};",
    "div": "{d} = {a} / {b};",
    "neg": "{d} = -{a};",
    # Signed integers of C may not overflow; those of expressions wrap around.
    "add s32": "{d} = ({W})(({U}){a} + ({U}){b});",
    "sub s32": "{d} = ({W})(({U}){a} - ({U}){b});",
    "mul s32": "{d} = ({W})(({U}){a} * ({U}){b});",
    "neg s32": "{d} = ({W})-({U}){a};",
    "fma": "{d} = {a} * {b} + {c};",
    "lt": "{d} = {a} < {b};",
    "le": "{d} = {a} <= {b};",
    "eq": "{d} = {a} == {b};",
    "ne": "{d} = {a} != {b};",
    "and": "{d} = {a} & {b};",
    "or": "{d} = {a} | {b};",
    "xor": "{d} = {a} ^ {b};",
    "not": "{d} = ~{a};",
    "shl": "{d} = ({W})(({U}){a} << {b});",
    "shr": "{d} = {a} >> {b};",
    "bits": "{d} = ({W}){a};",
    "from_bits": "{d} = ({R}){a};",
    "float": "{d} = __builtin_convertvector({a}, {R});",
    "int": "{d} = __builtin_convertvector({a}, {W});",
    "select": "{d} = ({T})((({W}){b} & {a}) | (({W}){c} & ~{a}));",
    "abs f32": "{d} = ({R})(({W}){a} & 0x7fffffff);",
    "abs s32": "{d} = ({W})(({U})({a} ^ ({a} >> 31)) - ({U})({a} >> 31));",
    "min f32": "{{ const {W} m = ({b} < {a}) | ({b} != {b}); {d} = ({R})((({W}){b} & m) | (({W}){a} & ~m)); }}",
    "max f32": "{{ const {W} m = ({b} > {a}) | ({b} != {b}); {d} = ({R})((({W}){b} & m) | (({W}){a} & ~m)); }}",
    "greater": "{{ const {W} m = {a} > {b}; {d} = ({R})((({W}){a} & m) | (({W}){b} & ~m)); }}",
    "min s32": "{{ const {W} m = {b} < {a}; {d} = ({b} & m) | ({a} & ~m); }}",
    "max s32": "{{ const {W} m = {b} > {a}; {d} = ({b} & m) | ({a} & ~m); }}",
    "literal f32": "(({R}){{0}} + {a})",
    "literal s32": "(({W}){{0}} + {a})",
    "literal mask": "(({W}){{0}} - {a})",
    "splat": "{d} = {a} - ({R}){{0}};",  # minus, which keeps the sign of a zero
    "whole": "{d} = ({W}){{0}} + (int)({count});",
    "lanes": "{d} = ({W}){{{lanes}}} + (int)({count});",
}
_SCALAR = _VECTOR | {
    "not mask": "{d} = !{a};",
    "bits": "{{ union {{ float f; int i; }} v = {{{a}}}; {d} = v.i; }}",
    "from_bits": "{{ union {{ int i; float f; }} v = {{{a}}}; {d} = v.f; }}",
    "float": "{d} = (float){a};",
    "int": "{d} = {a} >= -0x1p31f && {a} < 0x1p31f ? (int){a} : -0x7fffffff - 1;",
    "select": "{d} = {a} ? {b} : {c};",
    "abs f32": "{d} = __builtin_fabsf({a});",
    "min f32": "{d} = {b} < {a} || {b} != {b} ? {b} : {a};",
    "max f32": "{d} = {b} > {a} || {b} != {b} ? {b} : {a};",
    "greater": "{d} = {a} > {b} ? {a} : {b};",
    "min s32": "{d} = {b} < {a} ? {b} : {a};",
    "max s32": "{d} = {b} > {a} ? {b} : {a};",
    "literal f32": "{a}",
    "literal s32": "{a}",
    "literal mask": "{a}",
    "splat": "{d} = {a};",
    "whole": "{d} = (int)({count});",
    "lanes": "{d} = (int)({count});",
}


def types(isa: Isa, real: Atom) -> tuple[str, str, str]:
    """The C types of vectors of f32, of s32, and of masks."""
    own = isa.lanes(real.n)
    if own and own.whole_type:
        return real.acc_type, own.whole_type, own.mask_type
    whole = "int" if real.n == 1 else f"{real.acc_type}_w"
    return real.acc_type, whole, whole


def declaration(isa: Isa, real: Atom) -> str:
    """The C declaration of vectors of s32 as wide as those of `real`; empty if none is needed."""
    first, second, _ = types(isa, real)
    if second != f"{first}_w":
        return ""
    attribute = f"__attribute__((vector_size(sizeof({first}))))"
    return f"typedef int {second} {attribute};\ntypedef unsigned {unsigned(isa, real)} {attribute};"


def unsigned(isa: Isa, real: Atom) -> str:
    """The C type of vectors of u32."""
    return "unsigned" if real.n == 1 else f"{types(isa, real)[0]}_n"


def text(isa: Isa, real: Atom, op: str, operand: str) -> str:
    """The statement for an operation on operands of type `operand`; empty if there is none."""
    own = isa.lanes(real.n)
    table = _SCALAR if real.n == 1 else _VECTOR
    for name in (f"{op} {operand}", op):
        spelling = (own.words.get(name, "") if own else "") or ("" if own and own.whole_type else table.get(name, ""))
        if spelling:
            return spelling
    return ""


def literal(isa: Isa, real: Atom, value: float, dtype: str) -> str:
    """The spelling of a literal in every lane."""
    if dtype == "f32":
        value = float(value)
        own = isa.lanes(real.n)
        words = own.words if own else {}
        if math.isnan(value):
            number = words.get("nan", '__builtin_nanf("")')
        elif math.isinf(value):
            number = f"{'-' if value < 0 else ''}{words.get('infinity', '__builtin_inff()')}"
        else:
            number = f"{shortest(value)}f"
        minus_zero = value == 0 and math.copysign(1, value) < 0
        if minus_zero and real.n > 1 and text(isa, real, "literal", dtype) == _VECTOR["literal f32"]:
            return f"(-({real.acc_type}){{0}})"
    else:
        number = str(int(value)) if value > -(2**31) else "(-0x7fffffff - 1)"
    first, second, _ = types(isa, real)
    return text(isa, real, "literal", dtype).format(a=f"({number})" if number[0] == "-" else number, R=first, W=second)
