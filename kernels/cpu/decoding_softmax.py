"""Softmax of few queries: lanes of keys, a query at a time, and the rule by which two runs of keys become one.

A query's scores are a row; its maximum, its sum of weights and the change of earlier sums are numbers
(`kernels/cpu/online_softmax.py` has lanes of queries).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, var
from portmm.ir.lane_nodes import Map, Total
from portmm.ir.nodes import For, Function, Move, Param, Scratch, Verb
from portmm.kernels.cpu.elementwise import Elements, parameters, spread, vectors
from portmm.kernels.cpu.online_softmax import BEFORE, KEPT, MOST, weight
from portmm.spec.epilogue import C, Fused, acc, index
from portmm.spec.expr_functions import select

if TYPE_CHECKING:
    from portmm.ir.attention_program import Bounds
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


def weights(isa: Isa, real: Atom, scores: Fused, bounds: Bounds) -> Function:
    """Function that turns s[keys], the scores of one query, into weights, and updates its maximum, sum and change."""
    ((_, score),) = scores.results
    score = select(bounds.seen(index("p"), index("n"), index("w")), score, float("-inf")) if bounds else score
    weighed, change = weight(KEPT, MOST), weight(BEFORE, MOST)
    at = Elements(
        isa, real, Fused(scores.operands, ((C, score), (C, weighed), (C, change))), const(0), var("query"), var("key"),
        further={"p": var("query") + var("offset"), "w": var("window")},
    )  # fmt: skip
    name, n, lanes = real.name, var("keys"), real.n
    fixed: tuple[Stmt, ...] = at.once([score], "bhmpw")
    row_names = dict(at.names)

    def largest(j: Index, few: str) -> tuple[Stmt, ...]:
        at.names = row_names | {acc(): at.name(acc())}
        stmts = [Verb("load_c", at.names[acc()], p=Ptr("s", j), of=name), *at.compute([score], j, few)]
        value, before = at.value(score)
        stmts += before
        if few:
            stmts += [
                Map("lanes", "place", (), "s32", "s32", name, const(0)),
                Map("whole", "count", (), "s32", "s32", name, var(few)),
                Map("lt", "there", ("place", "count"), "mask", "s32", name),
                Map("select", "kept", ("there", value, float("-inf")), "f32", "f32", name),
            ]
            value = "kept"
        store = Verb("store", value, p=Ptr("s", j), of=name)
        return (*stmts, store, Map("greater", "most", (value, "most"), "f32", "f32", name))

    def weigh(j: Index, few: str) -> tuple[Stmt, ...]:  # noqa: ARG001 - past the last key are scores of -inf
        at.names = {MOST: "largest", KEPT: at.name(KEPT)}
        stmts = [Verb("load_c", at.names[KEPT], p=Ptr("s", j), of=name), *at.compute([weighed], j, "")]
        value = at.names[weighed]
        store = Verb("store", value, p=Ptr("s", j), of=name)
        return (*stmts, store, Map("add", "sum", ("sum", value), "f32", "f32", name))

    body: list[Stmt] = [*at.scratch(), Scratch("lane", lanes, "f32"), Scratch("whole_sum", 1, "f32"), *fixed]
    body += [
        *spread(real, "before", Ptr("mosts")),
        *spread(real, "most", Ptr("mosts")),
        *vectors(at, const(0), n, largest),
    ]
    body += [Verb("store", "most", p=Ptr("lane"), of=name), Total("max", Ptr("mosts"), Ptr("lane"), lanes)]
    body += [
        *spread(real, "largest", Ptr("mosts")),
        Map("literal", "sum", (0.0,), "f32", "f32", name),
        *vectors(at, const(0), n, weigh),
    ]
    body += [Verb("store", "sum", p=Ptr("lane"), of=name), Total("add", Ptr("whole_sum"), Ptr("lane"), lanes)]
    at.names = {MOST: "largest", BEFORE: "before"}
    body += [*at.compute([change], const(0), ""), Verb("store", at.names[change], p=Ptr("lane"), of=name)]
    body += [
        Move(Ptr("changes"), Ptr("lane")),
        *spread(real, "total", Ptr("sums")),
        *spread(real, "fresh", Ptr("whole_sum")),
    ]
    body += [Map("fma", "total", ("total", at.names[change], "fresh"), "f32", "f32", name)]
    body += [Verb("store", "total", p=Ptr("lane"), of=name), Move(Ptr("sums"), Ptr("lane"))]
    params = [Param(x) for x in ("keys", "item", "head", "key", "query", "offset", "window")]
    params += [Param(x, "f32") for x in ("s", "mosts", "sums", "changes")]
    comment = "s[keys] = weights of the scores of one query, beside those of the blocks before"
    return Function("weights", "inner", (*params, *parameters(scores)), tuple(body), comment)


def joined(isa: Isa, real: Atom) -> Function:
    """Function that combines two runs of keys, in place of the first."""
    mine, other = weight(BEFORE, MOST), weight(KEPT, MOST)
    at = Elements(isa, real, Fused((), ((C, mine), (C, other))))
    name, j, i = real.name, var("j"), var("i")
    at.names = {MOST: "most", BEFORE: "before", KEPT: "next"}
    numbers: list[Stmt] = [Verb("load_c", "before", p=Ptr("mosts", j)), Verb("load_c", "next", p=Ptr("mosts_next", j))]
    numbers += [Map("greater", "most", ("next", "before"), "f32", "f32", name)]
    numbers += [*at.compute([mine, other], j, ""), Verb("load_c", "sum", p=Ptr("sums", j))]
    numbers += [Verb("load_c", "more", p=Ptr("sums_next", j))]
    numbers += [Map("mul", "sum", ("sum", at.names[mine]), "f32", "f32", name)]
    numbers += [Map("fma", "sum", ("more", at.names[other], "sum"), "f32", "f32", name)]
    kept = (("most", "mosts"), ("sum", "sums"), (at.names[mine], "changes"), (at.names[other], "changes_next"))
    numbers += [Verb("store", x, p=Ptr(to, j)) for x, to in kept]
    here = i * var("across") + j
    row = [*spread(real, "a", Ptr("changes", i)), *spread(real, "b", Ptr("changes_next", i))]
    step = (
        Verb("load_c", "x", p=Ptr("o", here)),
        Verb("load_c", "y", p=Ptr("o_next", here)),
        Map("mul", "x", ("x", "a"), "f32", "f32", name),
        Map("fma", "x", ("y", "b", "x"), "f32", "f32", name),
        Verb("store", "x", p=Ptr("o", here)),
    )
    row.append(For("j", const(0), var("across"), const(real.n), step))
    body = (
        For("j", const(0), var("rows"), const(real.n), tuple(numbers)),
        For("i", const(0), var("rows"), const(1), tuple(row)),
    )
    names = ("mosts", "sums", "changes", "o")
    params = [Param("rows"), Param("across"), *(Param(x, "f32") for x in names)]
    params += [Param(f"{x}_next", "f32") for x in names]
    return Function("joined", "inner", tuple(params), body, "Two runs of keys together")
