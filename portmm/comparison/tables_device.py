"""Tables of runs on a device.

Owns the tables of the results of `bench/gpu.py --save`.
"""

from __future__ import annotations

from typing import Any

from portmm.comparison.tables_cells import table


def device(stem: str, data: dict[str, Any]) -> str:
    """Tables of a run on a device: the bars, each case with the best of its peers, candidates of products."""
    rows = [x for x in data["rows"] if x["state"] == "ok"]
    judged = [x for x in rows if "right" in x]
    parts = [f"**{stem}**: {sum(x['right'] for x in judged)} of {len(judged)} products checked are right."]
    bars = [x for x in data["bars"] if x["reached"] is not None]
    if bars:
        shown = [[x["bar"], x["least"], f"{x['reached']:.3g}", f"{x['measured']}/{x['of']}", x["state"]] for x in bars]
        parts.append(table(["bar", "at least", "reached", "cases", ""], shown))
    timed = [_timed(x) for x in rows if x["seconds"]]
    head = ["m x n x k", "types", "B by", "", "us", "TFLOP/s", "best peer", "of its speed"]
    parts += [table(head, timed)] if timed else []
    surveys = [x for x in data["surveys"] if x.get("correlation") is not None]
    if surveys:
        shown = [[x["name"], x["candidates"], f"{x['correlation']:.2f}", f"{x['chosen']:.2f}"] for x in surveys]
        parts.append(table(["candidates of", "", "rank correlation", "chosen, of the best"], shown))
    parts += [", ".join(f"{x['tool']}: {x['state']}" for x in data["sanitizer"])]
    left = [x["name"] for x in data["rows"] if x["state"] != "ok"] + data["notes"].get("not run", [])
    parts += [f"Not measured: {', '.join(left)}."] if left else []
    return "\n\n".join(filter(None, parts))


def device_ratio(x: dict[str, Any]) -> float | None:
    """Rate of a case over that of its best peer; of decode layers as graphs, where they have graphs."""
    times, suffix = _times(x)
    ratio: float | None = x[f"ratio{suffix}"] if len(times) > 1 else None
    return ratio


def _times(x: dict[str, Any]) -> tuple[dict[str, float], str]:
    return (x["graph"], "_graph") if x.get("graph") else (x["seconds"], "")


def _timed(x: dict[str, Any]) -> list[str]:
    """Cells of a case."""
    times, suffix = _times(x)
    peers = {name: seconds for name, seconds in times.items() if name != "portmm"}
    best = min(peers, key=lambda name: peers[name], default="")
    rate = f"{x[f'tflops{suffix}']:.3g}"
    label = ", ".join(filter(None, (x["section"], x["more"])))
    size, us = f"{x['m']} x {x['n']} x {x['k']}", f"{1e6 * times['portmm']:.1f}"
    return [size, x["dtype"], x["b"], label, us, rate, best, f"{x[f'ratio{suffix}']:.2f}" if peers else ""]
