"""Schedules as text: one string, for a kernel's header, the command line and databases.

Owns `spell` and `parse`. The text has flat fields, whatever the parts of a `Schedule` are: `flat` and `of_flat` are
the one place that knows both.
"""

from __future__ import annotations

from typing import Any

from portmm.schedule import parts
from portmm.schedule.parts import AtomUse, OperandPlan, Parallel, Staging, Tile
from portmm.schedule.schedule import Schedule
from portmm.spec.dequantization import of_words

TALLEST = 1024
"""Largest MR of any register tile, so that a parsed string can be bounded by it."""
LEVELS = ("registers", "L1", "L2", "L3")
DEVICE_LEVELS = ("registers", "warp", "shared", "L2")
"""Memory levels of a device: of a thread, a warp, a block, and all blocks."""
IN_PLACE = ("direct", "stream", "rows", "columns")
"""Programs of devices that read operands in place."""
_NAMED = ("a", "b", "panels", "over", "lanes", "prefetch")
_MARKS = (
    "pack_a", "pack_b", "once", "inside", "pack_c", "swap", "ahead", "copies", "pingpong", "grouped", "joined",
    "held_a", "exchange", "symmetric", "e2m1", "half", "pack_v",
)  # fmt: skip
_USUAL: dict[str, Any] = {
    "a": "row", "b": "row", "c": "row", "panels": 1, "over": "tiles", "lanes": 0, "prefetch": 0, "along": 0, "kr": 1,
    "group": 0, "source": "", "fused": "", "static": None, "stages": 0, "split": 1, "vectors": (1, 1, 1),
    "cell": (1, 1), "v": "", "resident": 0, "groups": 0, "cluster": 1, "persistent": 0, **dict.fromkeys(_MARKS, False),
}  # fmt: skip
"""Flat fields besides program, isa, dtype and tiles, with their defaults."""


def flat(s: Schedule) -> dict[str, Any]:
    """The parts of a schedule as flat fields."""
    x = s.parallel
    return {
        "program": s.program, "isa": s.isa, "dtype": s.dtype, "tiles": s.tiles,
        "a": s.a.layout, "b": s.b.layout, "c": s.c.layout, "panels": s.b.panels,
        "pack_a": s.a.packed, "pack_b": s.b.packed, "once": s.b.once, "inside": s.b.inside, "pack_c": s.c.packed,
        "prefetch": s.b.prefetch, "along": s.b.along, "symmetric": s.b.symmetric, "e2m1": s.b.e2m1, "half": s.b.half,
        "ahead": s.c.prefetch > 0, "group": s.b.group, "source": s.a.source, **s.atom._asdict(),
        "fused": s.epilogue, "static": s.static, "stages": s.stages, "copies": s.b.asynchronous,
        "vectors": s.vectors + ((s.v.vector,) if s.v else ()), "over": x.over, "split": x.split, "joined": x.fixup,
        "cell": x.cell, "resident": x.occupancy, "groups": x.warpgroups, "pingpong": x.pingpong,
        "cluster": x.cluster, "persistent": x.persistent, "grouped": x.grouped,
        "v": s.v.layout if s.v else "", "pack_v": s.v is not None and s.v.packed,
        "held_a": s.v is not None and s.a.at(parts.REGISTERS) is not None,
        "exchange": s.c.by(parts.SHUFFLE) is not None,
    }  # fmt: skip


def of_flat(program: str, isa: str, dtype: str, tiles: tuple[Tile, ...], **fields: Any) -> Schedule:
    """The schedule of flat fields; absent ones have their defaults.

    Raises:
        ValueError: they contradict each other.
    """
    x = _USUAL | fields
    if x["once"] and not x["pack_b"]:
        raise ValueError("it packs B once for all threads, but does not pack B")
    if x["inside"] and (x["once"] or not x["pack_b"]):
        raise ValueError("it packs B inside a micro-kernel, but does not pack B there")
    a, b, c, v = [], [], [], None
    if x["stages"]:
        method = parts.TMA if x["groups"] else parts.ASYNC if x["copies"] else parts.THROUGH
        where = (parts.REGISTERS, parts.LOAD) if program in IN_PLACE else (parts.SHARED, method)
        a, b = ([Staging(*where, x["stages"], vector)] for vector in x["vectors"][:2])
        c = [Staging(parts.REGISTERS, parts.SHUFFLE if x["exchange"] else parts.LOAD, 1, x["vectors"][2])]
        if x["v"]:  # attention keeps a tile of Q, perhaps in registers, and as many of K as of V
            v = OperandPlan(x["v"], (b[0]._replace(vector=x["vectors"][3]),))
            a = [a[0]._replace(method=parts.THROUGH, buffers=1)]
            a = [a[0]._replace(level=parts.REGISTERS, method=parts.LOAD), *a] if x["held_a"] else a
    else:
        b += [Staging(parts.REGISTERS, parts.LOAD, x["panels"])] if x["panels"] > 1 else []
        ahead = parts.PREFETCHED._replace(buffers=x["prefetch"], vector=x["along"] or 1)
        b += [ahead] if x["prefetch"] or x["along"] else []
        c += [parts.PREFETCHED] if x["ahead"] else []
        c += [parts.PACKED] if x["pack_c"] else []
        a += [parts.PACKED] if x["pack_a"] else []
        how = parts.PACKED_ONCE if x["once"] else parts.PACKED_INSIDE if x["inside"] else parts.PACKED
        b += [how] if x["pack_b"] else []
        v = OperandPlan(x["v"], (parts.PACKED,) if x["pack_v"] else ()) if x["v"] else None
    return Schedule(
        program, isa, dtype, tiles,
        AtomUse(x["lanes"], x["kr"], x["swap"]),
        OperandPlan(x["a"], tuple(a), 0, x["source"]),
        OperandPlan(x["b"], tuple(b), x["group"], "", x["symmetric"], x["e2m1"], x["half"]),
        OperandPlan(x["c"], tuple(c)),
        Parallel(
            x["over"], x["split"], x["joined"], x["cell"], x["resident"], x["groups"], x["pingpong"], x["cluster"],
            x["persistent"], x["grouped"],
        ),
        x["fused"],
        x["static"],
        v,
    )  # fmt: skip


def varied(s: Schedule, **fields: Any) -> Schedule:
    """A schedule with other values of some flat fields."""
    return of_flat(**(flat(s) | fields))


def spell(s: Schedule) -> str:
    """A schedule as one string, for a kernel's header and the command line."""
    x = flat(s)
    tiles = "/".join(f"{t.m}x{t.n}x{t.k}" for t in s.tiles)
    marks = [f"{name}={x[name]}" for name in _NAMED]
    marks += [f"{name}={x[name]}" for name in ("along",) if x[name]]
    marks += [f"kr={x['kr']}"] if x["kr"] > 1 else []
    marks += [f"{name}={x[name]}" for name in ("source", "fused") if x[name]]
    marks += [f"group={x['group']}"] if x["b"] == "codes" else []
    marks += [name for name in _MARKS if x[name]]
    marks += [f"split={x['split']}"] if x["split"] > 1 and not x["stages"] else []
    marks += [f"cell={'x'.join(map(str, x['cell']))}"] if x["cell"] != (1, 1) and not x["stages"] else []
    marks += [f"v={x['v']}"] if x["v"] else []
    if x["stages"]:
        marks += [f"stages={x['stages']}", f"split={x['split']}"]
        marks += [f"{name}={'x'.join(map(str, x[name]))}" for name in ("vectors", "cell")]
        marks += [f"c={x['c']}"] if x["c"] != "row" else []
        marks += [f"resident={x['resident']}"] if x["resident"] else []
        marks += [f"groups={x['groups']}", f"cluster={x['cluster']}"] if x["groups"] else []
        marks += [f"persistent={x['persistent']}"] if x["persistent"] else []
    marks += [f"static={'x'.join(map(str, s.static))}"] if s.static else []
    return ":".join([s.program, s.isa, s.dtype, tiles, f"{s.heights[0]}-{s.mr}", ",".join(marks)])


def parse(text: str) -> Schedule:
    """The schedule that `spell` wrote.

    Raises:
        ValueError: `text` is not such a string.
    """
    try:
        program, isa, dtype, tiles, mr_range, marks = _fields(text)
        sizes = [[int(x) for x in t.split("x")] for t in tiles.split("/")]
        least, most = (min(int(x), TALLEST) for x in mr_range.split("-"))
        named = dict(x.partition("=")[::2] for x in marks.split(","))
        fields: dict[str, Any] = {name: named[name] for name in _NAMED}
        fields |= {name: _value(text, _USUAL[name]) for name, text in named.items() if name in _USUAL}
        if "post" in named:
            fields["fused"] = of_words(named["post"], named.get("fused", ""), dynamic="source" in named)
        levels = DEVICE_LEVELS if "stages" in named else LEVELS
        tile, *others = (Tile(level, *size) for level, size in zip(levels, sizes, strict=True))
        return of_flat(program, isa, dtype, (_with_variants(tile, least, most), *others), **fields)
    except KeyError as error:
        raise ValueError(f"{text!r} is not a schedule; its last part lacks {error.args[0]}=") from error
    except (IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{text!r} is not a schedule; an emitted kernel's header has one ({error})") from error


def _fields(text: str) -> list[str]:
    """Program, ISA, types, tiles, range of MR, and marks."""
    fields = text.split(":")
    if len(fields) != 6:
        raise ValueError(f"it has {len(fields)} of 6 fields, separated by colons")
    return fields


def _with_variants(tile: Tile, least: int, most: int) -> Tile:
    """The register tile of a kernel that contains variants of `least` to `most` rows."""
    if not 0 < least <= most == tile.m:
        raise ValueError(f"register tiles have {least} to {most} rows, and {tile.m}")
    return tile._replace(least=least if least < most else 0)


def _value(text: str, usual: Any) -> Any:
    """A value of a field, of the type of its default."""
    if isinstance(usual, bool):
        return True
    if isinstance(usual, int):
        return int(text)
    return text if isinstance(usual, str) else tuple(int(x) for x in text.split("x"))
