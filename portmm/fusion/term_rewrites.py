"""Rewrites of terms by laws of arithmetic: each has a side condition on labels.

Owns `RULES`, and `alternatives`, all terms that one rewrite makes. Σ_k (a b) is (Σ_k a) b only where b does not vary
along k: labels say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from portmm.fusion.terms import Heads, Term, attention, concat, dot, elementwise_term, literal, reduced


def rebuilt(x: Term, args: tuple[Term, ...]) -> Term:
    """A term with other operands."""
    if x.op in ("input", "const") or args == x.args:
        return x
    if x.op == "dot":
        return dot(x.data, *args)
    if x.op in ("sum", "most"):
        return reduced(x.op, x.data, *args)
    if x.op == "attention":
        return attention(args[0], args[1], args[2], x.data, *args[3:])
    if x.op == "concat":
        return concat(x.data[1:], *args)
    return elementwise_term(x.op, *args)


def subterms(roots: tuple[Term, ...]) -> list[Term]:
    """All terms under some, operands first."""
    seen: dict[Term, None] = {}

    def visit(x: Term) -> None:
        if x not in seen:
            for y in x.args:
                visit(y)
            seen[x] = None

    for x in roots:
        visit(x)
    return list(seen)


def replaced(roots: tuple[Term, ...], old: Term, new: Term) -> tuple[Term, ...]:
    """Terms in which one is replaced by another."""
    done: dict[Term, Term] = {old: new}
    for x in subterms(roots):
        if x not in done:
            done[x] = rebuilt(x, tuple(done[y] for y in x.args))
    return tuple(done[x] for x in roots)


def joined_extents(roots: tuple[Term, ...], extents: Mapping[str, int]) -> dict[str, int]:
    """The extents of labels, with those of concatenations under some terms."""
    known = dict(extents)
    for x in subterms(roots):
        if x.op == "concat":
            known[x.data[0]] = sum(known[y] for y in x.data[1:])
    return known


def alternatives(roots: tuple[Term, ...]) -> Iterator[tuple[str, tuple[Term, ...]]]:
    """Each rewrite of each term under some, with its name; a form has one concatenation, whose label is its alone.

    Beside products divisions take little time, and forms without them are left out.
    """
    every = subterms(roots)
    joined, products = (any(x.op in ops for x in every) for ops in (("concat",), ("dot", "attention")))
    for x in every:
        for name, rule in RULES.items():
            if (joined and rule is concatenate) or (products and rule is reciprocal):
                continue
            for new in rule(x):
                if new is not x and set(new.labels) == set(x.labels):
                    yield name, replaced(roots, x, new)


def associate(x: Term) -> Iterator[Term]:
    """(a b) c is a (b c): sums along two labels in the other order, each where its factors vary."""
    if x.op != "dot":
        return
    (left, right), k = x.args, x.data
    if left.op == "dot" and left.data not in right.labels:
        u, v = left.args
        if k in v.labels and k not in u.labels:
            yield dot(left.data, u, dot(k, v, right))
        if k in u.labels and k not in v.labels:
            yield dot(left.data, dot(k, u, right), v)
    if right.op == "dot" and right.data not in left.labels:
        u, v = right.args
        if k in u.labels and k not in v.labels:
            yield dot(right.data, dot(k, left, u), v)
        if k in v.labels and k not in u.labels:
            yield dot(right.data, u, dot(k, left, v))


def _factors(x: Term, along: str) -> Iterator[tuple[str, Term, Term]]:
    """A product or quotient as an operation, what varies along a label, and a factor that does not."""
    if x.op in ("mul", "div"):
        a, b = x.args
        if along in a.labels and along not in b.labels:
            yield x.op, a, b
        if x.op == "mul" and along in b.labels and along not in a.labels:
            yield x.op, b, a


def pull_factor(x: Term) -> Iterator[Term]:
    """A factor of rows or of columns is moved past a sum, with which it does not vary."""
    if x.op == "dot":
        a, b = x.args
        for op, inner, s in _factors(a, x.data):
            yield elementwise_term(op, dot(x.data, inner, b), s)
        for op, inner, s in _factors(b, x.data):
            yield elementwise_term(op, dot(x.data, a, inner), s)
    if x.op == "sum":
        for op, inner, s in _factors(x.args[0], x.data):
            yield elementwise_term(op, reduced("sum", x.data, inner), s)


def push_factor(x: Term) -> Iterator[Term]:
    """A factor of a product is moved to one of its operands, where it varies along no other labels than that."""
    for product, s in (x.args, x.args[::-1]) if x.op in ("mul", "div") else ():
        if product.op != "dot" or (x.op == "div" and product is not x.args[0]) or product.data in s.labels:
            continue
        a, b = product.args
        if set(s.labels) <= set(a.labels):
            yield dot(product.data, elementwise_term(x.op, a, s), b)
        if set(s.labels) <= set(b.labels):
            yield dot(product.data, a, elementwise_term(x.op, b, s))


def distribute(x: Term) -> Iterator[Term]:
    """A b + a c is a (b + c), and back."""
    if x.op in ("add", "sub") and all(y.op == "dot" for y in x.args):
        (a, b), (c, d) = (y.args for y in x.args)
        same = x.args[0].data == x.args[1].data
        if same and a is c and set(b.labels) == set(d.labels):
            yield dot(x.args[0].data, a, elementwise_term(x.op, b, d))
        if same and b is d and set(a.labels) == set(c.labels):
            yield dot(x.args[0].data, elementwise_term(x.op, a, c), b)
    if x.op == "dot":
        a, b = x.args
        for y, other in ((a, False), (b, True)):
            if y.op in ("add", "sub") and all(x.data in z.labels for z in y.args):
                u, v = y.args
                parts = [dot(x.data, a, z) if other else dot(x.data, z, b) for z in (u, v)]
                yield elementwise_term(y.op, *parts)


def concatenate(x: Term) -> Iterator[Term]:
    """A b + c d, with sums along two labels, is [a c] [b; d], with one sum along both."""
    if x.op != "add" or any(y.op != "dot" for y in x.args):
        return
    ((a, b), (c, d)), (k, r) = (y.args for y in x.args), (y.data for y in x.args)
    sides = zip((a, b), (c, d), strict=True)
    if k != r and all(k in y.labels and r in z.labels and {*y.labels} - {k} == {*z.labels} - {r} for y, z in sides):
        left, right = concat(k + r, a, c), concat(k + r, b, d)
        yield dot(left.data[0], left, right)


def online_softmax(x: Term) -> Iterator[Term]:
    """Exponentials times values over the exponentials' sum are attention, whatever is subtracted before."""
    if x.op != "div" or x.args[0].op != "dot" or x.args[1].op != "sum":
        return
    product, total = x.args
    n = product.data
    weights = total.args[0]
    values = next((y for y, z in (product.args, product.args[::-1]) if z is weights), None)
    if values is None or total.data != n or weights.op != "exp":
        return
    score = weights.args[0]
    if score.op == "sub" and score.args[1].op == "most":
        most = score.args[1]
        score = score.args[0] if most.data == n and most.args[0] is score.args[0] else score
    scaled = _scaled_dot(score)
    if scaled is not None:
        yield from _attentions(scaled[1], values, n, scaled[0])


def _scaled_dot(x: Term) -> tuple[float, Term] | None:
    """A product and the literal that it is multiplied with."""
    if x.op == "dot":
        return 1.0, x
    if x.op in ("mul", "div") and x.args[1].op == "const" and x.args[0].op == "dot":
        return (x.args[1].data if x.op == "mul" else 1 / x.args[1].data), x.args[0]
    if x.op == "mul" and x.args[0].op == "const" and x.args[1].op == "dot":
        return x.args[0].data, x.args[1]
    return None


def _attentions(scores: Term, v: Term, n: str, scale: float) -> Iterator[Term]:
    """Attention with these scores and values, with labels of queries alone as heads or as queries."""
    d, (a, b) = scores.data, scores.args
    q, k = (a, b) if n in b.labels else (b, a)
    heads = "".join(y for y in k.labels if y in q.labels and y in v.labels and y != d)
    rest = "".join(y for y in q.labels if y not in heads + d)
    columns = "".join(y for y in v.labels if y not in heads + n)
    fits = set(k.labels) == {*heads, n, d} and n not in q.labels and len(columns) == 1
    if not fits or columns in q.labels + k.labels or set(rest) & set(v.labels):
        return
    for i in range(len(rest) + 1):
        yield attention(q, k, v, Heads(heads, rest[:i], rest[i:], n, d, columns, scale))
    parts = [_factor_of_rows(x, y, heads + z) for x, y, z in ((q, d, rest), (k, d, n), (v, columns, n))]
    if len(rest) == 1 and any(factor.labels for _, factor in parts):
        (q, a), (k, b), (v, c) = parts
        yield attention(q, k, v, Heads(heads, "", rest, n, d, columns, scale), a, b, c)


def _factor_of_rows(x: Term, along: str, rows: str) -> tuple[Term, Term]:
    """The factor of a term that varies with its rows, but not along them, or 1; before it what remains."""
    one = literal(1.0)
    for op, inner, factor in _factors(x, along):
        if set(factor.labels) == set(rows):
            return inner, factor if op == "mul" else elementwise_term("div", one, factor)
    return x, one


def inverse(x: Term) -> Iterator[Term]:
    """A (1 / b) is a / b, and (a / b) c is a c / b."""
    if x.op == "mul":
        for a, b in (x.args, x.args[::-1]):
            if b.op == "div" and b.args[0] is literal(1.0):
                yield elementwise_term("div", a, b.args[1])
            elif b.op == "div" and b.args[0].labels:
                yield elementwise_term("div", elementwise_term("mul", b.args[0], a), b.args[1])


def reciprocal(x: Term) -> Iterator[Term]:
    """A quotient by what varies along fewer labels is a product: a division for each row, not for each element."""
    if x.op == "div" and x.args[1].labels:
        a, b = x.args
        if set(b.labels) < set(a.labels):
            yield elementwise_term("mul", a, elementwise_term("div", literal(1.0), b))


RULES: dict[str, Callable[[Term], Iterator[Term]]] = {
    "association": associate,
    "factor past a sum": pull_factor,
    "factor into a product": push_factor,
    "distribution": distribute,
    "concatenation": concatenate,
    "online softmax": online_softmax,
    "quotient": inverse,
    "reciprocal": reciprocal,
}
