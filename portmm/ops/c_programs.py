"""Functions of the library for C: programs of kernels with fixed shapes, as C that fills in addresses and launches.

Owns the records of a function and of its programs, one for each machine and number of threads, and their text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from portmm.ir.nodes import Kernel

Address = tuple[str, int]
"""Where memory lies: a root, and bytes from there. Roots are `x3`, an argument or result, `A`, the memory between
kernels, and `c` with a digest, a constant."""
C_TYPES = {
    "f32": "float", "f64": "double", "f16": "unsigned short", "bf16": "unsigned short", "s8": "signed char",
    "u8": "unsigned char", "s32": "int",
}  # fmt: skip
SIZES = ("m", "n", "k", "batch", "a_m", "a_k", "a_batch", "b_k", "b_n", "b_batch", "c_m", "c_n", "c_batch")
"""Fields of the argument block that are numbers, in the order of a launch."""


class Step(NamedTuple):
    """One run of a kernel.

    Attributes:
        kernel: the kernel.
        work: bytes of its workspace.
        workers: the most threads.
        bytes: of an element of A, of a unit of B, and of C.
        numbers: values of `SIZES`.
        addresses: of A, B and C, where it has them.
        row: its first operand among those of the program; -1 without.
        number: likewise among the numbers.
        offsets: of further runs, as triples.
    """

    kernel: Kernel
    work: int
    workers: int
    bytes: tuple[int, ...]
    numbers: tuple[int, ...]
    addresses: tuple[Address | None, ...]
    row: int
    number: int
    offsets: tuple[int, ...]


class Program(NamedTuple):
    """The kernels of a call, in order.

    Attributes:
        steps: the runs.
        rows: operands of fused expressions: an address, and four strides.
        numbers: of expressions: values, or the index of an argument.
        arena: bytes of memory between kernels.
    """

    steps: tuple[Step, ...]
    rows: tuple[tuple[Address, tuple[int, ...]], ...]
    numbers: tuple[float | str, ...]
    arena: int

    @property
    def constants(self) -> set[str]:
        """Digests of the constants that it reads."""
        every = [x for s in self.steps for x in s.addresses if x is not None] + [at for at, _ in self.rows]
        return {root[1:] for root, _ in every if root.startswith("c")}


class Parameter(NamedTuple):
    """An argument or a result of a function in C; a number has no shape."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None

    @property
    def extent(self) -> str:
        """The shape in words."""
        return "x".join(map(str, self.shape or ())) or "1"

    def declared(self, *, written: bool) -> str:
        """The parameter in C."""
        if self.shape is None:
            return f"float {self.name}"
        return f"{'' if written else 'const '}{C_TYPES[self.dtype]} *{self.name}"

    @property
    def words(self) -> str:
        """Shape and type, for a comment."""
        return f"{self.name}: {self.extent} {self.dtype}" if self.shape is not None else f"{self.name}: a number"


class Function(NamedTuple):
    """A function of the library.

    Attributes:
        name: in C after `portmm_`.
        arguments: its arguments.
        results: its results, which follow.
        programs: by machine and number of threads.
        constants: bytes by digest.
    """

    name: str
    arguments: tuple[Parameter, ...]
    results: tuple[Parameter, ...]
    programs: dict[tuple[str, int], Program]
    constants: dict[str, bytes]

    @property
    def declaration(self) -> str:
        """Its prototype, without the semicolon."""
        every = [x.declared(written=False) for x in self.arguments] + [x.declared(written=True) for x in self.results]
        return f"int portmm_{self.name}({', '.join(every)})"


def header_of(functions: list[Function]) -> str:
    """The declarations of functions, with shapes and types."""
    lines = []
    for f in functions:
        of_arguments, of_results = ("; ".join(x.words for x in y) for y in (f.arguments, f.results))
        lines.append(f"/* {of_arguments} -> {of_results} */\n{f.declaration};\n")
    return "\n".join(lines)


def program_text(p: Program, number: int, kernel: Callable[[Kernel], str]) -> str:
    """The C function of a program, which returns a status.

    Args:
        p: the program.
        number: of its name.
        kernel: names the function of a kernel.
    """
    lines = [f"static int program_{number}(char *const *x, const float *v, char *A) {{", "  (void)x, (void)v, (void)A;"]
    if p.rows:
        rows = ", ".join(f"{{{_address(at)}, {', '.join(map(str, steps))}}}" for at, steps in p.rows)
        lines.append(f"  const portmm_operand t[] = {{{rows}}};")
    if p.numbers:
        numbers = ", ".join(x if isinstance(x, str) else _float(x) for x in p.numbers)
        lines.append(f"  const float n[] = {{{numbers}}};")
    lines += [f"  if ({_run(s, kernel(s.kernel))}) return PORTMM_MEMORY;" for s in p.steps]
    return "\n".join([*lines, "  return PORTMM_OK;", "}"])


def _run(s: Step, function: str) -> str:
    fields = [f".{name} = {value}" for name, value in zip(SIZES, s.numbers, strict=True) if value]
    fields += [f".{x} = {_address(at)}" for x, at in zip("abc", s.addresses, strict=True) if at is not None]
    fields += [f".operands = t + {s.row}"] * (s.row >= 0) + [f".numbers = n + {s.number}"] * (s.number >= 0)
    offsets = f"(const long[]){{{', '.join(map(str, s.offsets))}}}" if s.offsets else "once"
    sizes = f"(const long[]){{{', '.join(map(str, s.bytes))}}}"
    block = f"&(const portmm_args){{{', '.join(fields)}}}"
    count = len(s.offsets) // 3 or 1
    return f"portmm_run((void *){function}, {s.work}, {s.workers}, {sizes}, {block}, {offsets}, {count})"


def _address(at: Address) -> str:
    """An address in C."""
    root, offset = at
    if root.startswith("x"):
        root = f"x[{root[1:]}]"
    elif root.startswith("c"):
        root = f"(char *)constant_{root[1:]}"
    return f"{root} + {offset}" if offset else root


def _float(x: float) -> str:
    """A float32 in C, exactly."""
    if x != x:  # noqa: PLR0124 - a NaN
        return '__builtin_nanf("")'
    if x in (float("inf"), float("-inf")):
        return "-__builtin_inff()" if x < 0 else "__builtin_inff()"
    return f"{float(x).hex()}f"


def tables_of(functions: list[Function], machines: Mapping[str, int], kernel: Callable[[Kernel], str]) -> str:
    """The programs and the entries of functions in C.

    Args:
        functions: the functions.
        machines: numbers of machines.
        kernel: names the function of a kernel.
    """
    lines: list[str] = []
    constants = {key: data for f in functions for key, data in f.constants.items()}
    lines += [_constant(key) for key in constants]
    known: dict[str, int] = {}
    for f in functions:
        variants = []
        for (machine, threads), program in sorted(f.programs.items(), key=lambda x: x[0][1]):
            text = program_text(program, 0, kernel)
            if text not in known:
                known[text] = len(known)
                lines.append(program_text(program, known[text], kernel))
            variants.append(f"{{{machines[machine]}, {threads}, {program.arena}, program_{known[text]}}}")
        lines.append(_entry(f, variants))
    return "\n".join(lines)


def _constant(key: str) -> str:
    """The bytes of a file, in the assembler's words."""
    return (
        f'__asm__(".pushsection .rodata\\n.balign 64\\n.local constant_{key}\\nconstant_{key}: '
        f'.incbin \\"constants/{key}.bin\\"\\n.popsection");\nextern const char constant_{key}[] '
        f'__attribute__((visibility("hidden")));'
    )


def _entry(f: Function, variants: list[str]) -> str:
    """The function that a program calls."""
    every = [*[(x, False) for x in f.arguments], *[(x, True) for x in f.results]]
    arrays = [(x, written) for x, written in every if x.shape is not None]
    pointers = ", ".join(f"(char *){x.name}" for x, _ in arrays)
    extents = ", ".join(str(_bytes(x)) for x, _ in arrays)
    floats = ", ".join(x.name for x, _ in every if x.shape is None) or "0"
    count = sum(written for _, written in arrays)
    return (
        f"EXPORT {f.declaration} {{\n"
        f"  static const struct variant variants[] = {{{', '.join(variants)}, {{-1, 0, 0, NULL}}}};\n"
        f"  static const long extents[] = {{{extents}}};\n"
        f"  return call(variants, (char *const[]){{{pointers}}}, extents, {len(arrays)}, {count}, "
        f"(const float[]){{{floats}}});\n}}"
    )


def _bytes(x: Parameter) -> int:
    from math import prod

    from portmm.spec.dtype import BY_NAME

    size: int = BY_NAME[x.dtype].bytes
    return prod(x.shape or ()) * size


def kernels_of(functions: list[Function]) -> dict[int, Kernel]:
    """The kernels of some functions, by identity."""
    return {id(s.kernel): s.kernel for f in functions for program in f.programs.values() for s in program.steps}
