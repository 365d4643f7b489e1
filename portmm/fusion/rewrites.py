"""Rewrite of a graph before it is split into kernels: attention.

Owns `match_attention`, a rule over exp, sum and product: where exp(s - max(s)), with s an element-wise expression
of a product, is multiplied by a matrix, and its sum divides it before or after that, they are replaced by
`attention`, which does not store s. The rule compares expressions and shapes of nodes, not their names: scores may be
any expression of their product, of numbers and of arrays that broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from portmm.fusion.graph import FLOATS, Graph, Node
from portmm.ops.attention import Launch, attention, launch_of
from portmm.spec.epilogue import argument, reduction
from portmm.spec.expr import Expr, apply
from portmm.trace.bind import filled
from portmm.trace.closures import traced_through
from portmm.util.records import dataclass

Heads = tuple[tuple[int, ...], tuple[int, ...]]
LEAST_SCORES, LEAST_CALLED = 1 << 12, 1 << 17
"""Scores from which one kernel is faster than three: as one of a program's kernels, and called between them."""
MOST_AXES = 4
"""Dimensions of queries, with one for items; with one more, heads of queries are in groups of the same keys."""
_FIRST, _SECOND = argument(0, "f32"), argument(1, "f32")
_OVER, _LESS = apply("div", _FIRST, _SECOND), apply("sub", _FIRST, _SECOND)
_INVERSE, _TIMES = apply("div", 1.0, _FIRST), apply("mul", _FIRST, _SECOND)
_SUM, _MOST = reduction("add", _FIRST), reduction("max", _FIRST)


def match_attention(graph: Graph, outputs: list[Node]) -> list[tuple[str, str]]:
    """Replace each softmax between products by attention; return (line, reason) of near matches that are kept."""
    apart: list[tuple[str, str]] = []
    users: dict[Node, list[Node]] = {}
    for x in graph.nodes:
        for y in x.inputs:
            users.setdefault(y, []).append(x)
    for x in list(graph.nodes):
        if x.kind == "map" and x.name == "exp" and len(x.inputs) == 1:
            match = _Softmax.of(x, users, outputs)
            if isinstance(match, str):
                apart.append((x.where, match))
            elif match is not None:
                match.replace(users)
    return apart


@dataclass(eq=False, slots=True)
class _Softmax:
    """A softmax between two products.

    Attributes:
        scores: the first product.
        steps: the element-wise operations on it, in order.
        values: the second product.
        last: the node that is the result.
        heads: the batch of queries, and of keys and values, as `attention` takes them, the heads last.
        names: of all operations replaced.
    """

    scores: Node
    steps: list[Node]
    values: Node
    last: Node
    heads: Heads | None
    names: tuple[str, ...]

    @classmethod
    def of(cls, x: Node, users: dict[Node, list[Node]], outputs: list[Node]) -> _Softmax | str | None:
        """The softmax of an exponential; or the reason why attention cannot replace it; or None if it is no softmax."""
        products = _after(x, users)
        if products is None:
            return None
        (power,), (total, values, last) = x.inputs, products
        less = [power, power.inputs[1]] if _is(power, _LESS) and _is(power.inputs[1], _MOST) else []
        less = less if less and less[1].inputs[0] is power.inputs[0] else []  # else without a maximum
        scores, steps = _chain(power.inputs[0] if less else power)
        if scores is None:
            return "scores are not an expression of one product"
        inverse = [y for y in users[total] if _is(y, _INVERSE)]
        inside = {scores, *steps, *less, x, total, *inverse, values, *_left(values)} - {last}
        for y in sorted(inside, key=lambda y: y.number):
            if y in outputs or any(z is not last and z not in inside for z in users[y]):
                return f"{y.name} ({y.where}) is also read elsewhere, so that all scores must be stored"
        names = tuple(y.name for y in sorted(inside | {last}, key=lambda y: y.number))
        match = cls(scores, steps, values, last, _heads(scores, steps, values, last), names)
        return match.refusal() or match

    def refusal(self) -> str:
        """The reason why one kernel does not compute it, or ""."""
        (q, k), v = self.scores.inputs, self.values.inputs[1]
        if any(x.kind == "weight" for x in (k, v)):
            return "keys or values are a packed weight"
        if not q.dtype == k.dtype == v.dtype == self.last.dtype or q.dtype.name not in FLOATS:
            return f"operands are {q.dtype}, {k.dtype} and {v.dtype}, and the result {self.last.dtype}"
        called = q.dtype != np.float32 and any(x.origin.kind == "array" for x in (q, k, v))
        if self.scores.size < (LEAST_CALLED if called else LEAST_SCORES):
            return f"{self.scores.size} scores fit in cache"
        if self.heads is None:
            return "batches of the products broadcast otherwise than over heads, or have more than two dimensions"
        return next((f"{x.name} ({x.where}) rounds scores first" for x in self.steps if x.rounds), "")

    def replace(self, users: dict[Node, list[Node]]) -> None:
        """Turn the last node into a call of attention, one user of each of its inputs."""
        (q, k), v, last = self.scores.inputs, self.values.inputs[1], self.last
        own = {self.scores, *self.steps}
        extras = list(dict.fromkeys(y for x in self.steps for y in x.inputs if y not in own))
        assert self.heads is not None  # noqa: S101 - `refusal` is asked first
        last.plain = _call(_score(self.scores, self.steps, extras), self.heads, last.shape)
        for x in last.inputs:
            users[x].remove(last)
        last.kind, last.inputs, last.template, last.name = "call", (q, k, v, *extras), None, "attention"
        for x in last.inputs:
            users[x].append(last)
        last.note = ", ".join(self.names)


def _is(x: Node, template: Any) -> bool:
    """Test whether a node computes this expression of its inputs."""
    return x.kind in ("map", "reduce") and x.template is template


def _after(x: Node, users: dict[Node, list[Node]]) -> tuple[Node, Node, Node] | None:
    """The sum of an exponential, the product that it is the left operand of, and the later of product and quotient."""
    totals = [y for y in users.get(x, ()) if _is(y, _SUM)]
    rest = [y for y in users.get(x, ()) if y not in totals]
    if len(totals) != 1 or len(rest) != 1 or len(users.get(totals[0], ())) != 1:
        return None
    (total,), (divided,) = totals, users[totals[0]]
    divisor, template = total, _OVER
    if _is(divided, _INVERSE) and len(users.get(divided, ())) == 1:
        divisor, template, (divided,) = divided, _TIMES, users[divided]
    if not _is(divided, template) or divided.inputs[1] is not divisor:
        return None
    if rest[0] is divided:
        after = users.get(divided, [])
        if len(after) == 1 and after[0].kind == "map" and after[0].rounds:
            after = users.get(after[0], [])
        values = last = after[0] if len(after) == 1 else divided
    else:
        values, last = rest[0], divided
    left = divided if last is values else x
    fits = values.kind == "matmul" and left in _left(values) and (last is values or divided.inputs[0] is values)
    return (total, values, last) if fits else None


def _left(product: Node) -> tuple[Node, ...]:
    """The left operand of a product, and the value that it was rounded from."""
    x = product.inputs[0]
    return (x, *x.inputs) if x.rounds and x.name == "astype" else (x,)


def _chain(s: Node) -> tuple[Node | None, list[Node]]:
    """The one product that a score is an expression of, and the steps from it; None if there is not exactly one."""
    depends: dict[Node, bool] = {}
    steps: list[Node] = []
    products: list[Node] = []

    def visit(x: Node) -> bool:
        if x not in depends:
            if x.kind == "matmul" and x.shape == s.shape and x.template is None:
                products.append(x)
                depends[x] = True
            elif x.kind == "map" and x.shape == s.shape and not x.of("index"):
                depends[x] = max([visit(y) for y in x.inputs])  # a list, so that all are visited
                if depends[x]:
                    steps.append(x)
            else:
                depends[x] = False
        return depends[x]

    visit(s)
    return (products[0], steps) if len(products) == 1 else (None, [])


def _score(product: Node, steps: list[Node], extras: list[Node]) -> Callable[..., Any]:
    """The score function of a product, arrays and numbers: of expressions or of arrays."""

    def score(s: Any, others: tuple[Any, ...]) -> Any:
        known = dict(zip(extras, others, strict=True))
        known[product] = s
        for x in steps:
            values = [known[y] for y in x.inputs]
            if not isinstance(s, Expr):
                known[x] = x.plain(*values)
            else:
                assert x.template is not None  # noqa: S101 - `_chain` takes no others
                known[x] = filled(x.template, [y.broadcast_() if hasattr(y, "broadcast_") else y for y in values])
        return known[steps[-1]] if steps else s

    return score


def _heads(scores: Node, steps: list[Node], values: Node, last: Node) -> Heads | None:
    """The heads of a `_Softmax`; None if `attention` takes none.

    Heads of queries that share one head of keys and values are those along which these broadcast: they are rows of
    queries unless other operands of the scores tell them apart.
    """
    (q, k), v = scores.inputs, values.inputs[1]
    batch, count = q.shape[:-2], len(q.shape) - 2
    shared = k.shape[:-2]
    if v.shape[:-2] != shared or last.shape[:-2] != batch or len(shared) > count:
        return None
    shared = (1,) * (count - len(shared)) + shared
    if count < 1:
        return (1,), (1,)
    wide = [y for x in steps for y in x.inputs if y not in (scores, *steps)]
    alike = all(len(y.shape) <= 1 or y.size == 1 for y in wide)
    if alike and shared[-1] == 1 and shared[:-1] == batch[:-1]:
        # Heads that share keys are rows of queries: keys are read once for all of them.
        return (shared[:-1], shared[:-1]) if count == MOST_AXES - 1 else (shared, shared)
    fits = count < MOST_AXES - 1 and shared[:-1] == batch[:-1] and shared[-1] in (1, batch[-1])
    return (batch, shared) if fits else None


def _call(score: Callable[..., Any], heads: Heads, result: tuple[int, ...]) -> Callable[..., Any]:
    """A call of attention with queries, transposed keys, values, and other operands of the scores."""
    batch, shared = heads

    def operands(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        q, (k, v) = q.reshape((*batch, -1, q.shape[-1])), (x.reshape(shared + x.shape[-2:]) for x in (k, v))
        return q, k.swapaxes(-1, -2), v

    def scored_by(others: tuple[Any, ...]) -> Callable[..., Any]:
        others = tuple([_number(x) for x in others])

        @traced_through
        def scored(s: Any, i: Any) -> Any:  # noqa: ARG001 - arrays broadcast
            return score(s, others)

        return scored

    def run(q: Any, k: Any, v: Any, *others: Any) -> Any:
        return attention(*operands(q, k, v), score=scored_by(others)).reshape(result)

    def launch(out: Any, q: Any, k: Any, v: Any, *others: Any) -> Launch:
        q, k, v = operands(q, k, v)
        return launch_of(q, k, v, scored_by(others), out.reshape((*q.shape[:-1], v.shape[-1])))

    run.launch = launch  # type: ignore[attr-defined]
    return run


def _number(x: Any) -> Any:
    """A number of a narrow type as one that scores are traced with; other operands as they are."""
    narrow = isinstance(x, (np.generic, np.ndarray)) and not x.ndim and x.dtype.name in ("bfloat16", "float16")
    return np.float32(x) if narrow else x
