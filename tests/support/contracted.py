"""Expressions of one argument, computed by NumPy as compilers may contract them."""

import numpy as np

from portmm.spec import expr
from portmm.spec.expr_ops import NUMPY, OPS


def unfused(a, b, c):
    return a * b + c


def fused(a, b, c):
    return OPS["fma"][1](a, b, c)


def value(root, x, world):
    """Value of an expression of one argument, where `world` is what becomes of products that meet a sum.

    Fused are those of fma, none, all, or of a sum of two products the other one.
    """
    values = {}
    with np.errstate(all="ignore"):
        for e in expr.ordered((root,)):
            args = [values[id(y)] for y in e.args if isinstance(y, expr.Expr)]
            product = next((k for k, y in enumerate(e.args) if isinstance(y, expr.Expr) and y.op == "mul"), None)
            if e.op == "load":
                values[id(e)] = x
            elif e.op == "const":
                values[id(e)] = NUMPY[e.dtype](e.args[0])
            elif world == "addend" and e.op == "fma" and e.args[2].op == "mul":
                values[id(e)] = fused(*(values[id(y)] for y in e.args[2].args), args[0] * args[1])
            elif e.op == "fma":
                values[id(e)] = (unfused if world == "none" else fused)(*args)
            elif world == "all" and e.op in ("add", "sub") and e.dtype == "f32" and product is not None:
                a, b = (values[id(y)] for y in e.args[product].args)
                other = args[1 - product]
                less = e.op == "sub"
                values[id(e)] = fused(-a if less and product == 1 else a, b, -other if less and product == 0 else other)
            else:
                values[id(e)] = OPS[e.op][1](*args)
    return values[id(root)]
