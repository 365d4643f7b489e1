"""C functions that reduce the lanes of a vector in memory to one number.

Owns `TOTALS`. The upper half of the lanes is taken into the lower until one remains, in vectors of the compiler, which
has them of any width; a maximum selects by masks, since branches on the order of values are mispredicted.
"""

from __future__ import annotations


def _total(name: str, kind: str, lanes: int) -> str:
    """The function for a number of lanes."""
    lines, vector = [f"static inline float {name}(const float *p) {{"], lanes // 2
    sizes = [2**i for i in range(2, vector.bit_length())] or [vector]
    for n in sizes:
        lines.append(f"  typedef float h{n} __attribute__((vector_size({4 * n}), aligned(4), may_alias));")
        if kind != "add":
            lines.append(f"  typedef int m{n} __attribute__((vector_size({4 * n})));")
    operands = f"*(const h{vector} *)p", f"*(const h{vector} *)(p + {vector})"
    while True:
        n = max(vector, sizes[0])
        lines += _taken(kind, n, vector, *operands)
        if vector == 1:
            break
        x = f"x{vector}"
        vector //= 2
        wide = max(vector, sizes[0])
        low = ", ".join(f"{x}[{i % vector}]" for i in range(wide))
        high = ", ".join(f"{x}[{vector + i % vector}]" for i in range(wide))
        operands = f"(h{wide}){{{low}}}", f"(h{wide}){{{high}}}"
    return "\n".join([*lines, "  return x1[0];", "}"])


def _taken(kind: str, n: int, number: int, low: str, high: str) -> list[str]:
    """Statements that add two vectors of n lanes, or select the larger elements."""
    if kind == "add":
        return [f"  const h{n} x{number} = {low} + {high};"]
    a, b, m = f"a{number}", f"b{number}", f"t{number}"
    return [
        f"  const h{n} {a} = {low}, {b} = {high};",
        f"  const m{n} {m} = ({b} > {a}) | ({b} != {b});",
        f"  const h{n} x{number} = (h{n})(((m{n}){b} & {m}) | ((m{n}){a} & ~{m}));",
    ]


TOTALS = {
    f"{name}_{lanes}": _total(f"{name}_{lanes}", kind, lanes)
    for name, kind in (("sum", "add"), ("most", "max"))
    for lanes in (4, 8, 16)
}
"""Functions by name: the sum or the maximum of 4, 8 or 16 lanes, NaN if any is NaN."""
