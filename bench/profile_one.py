"""Runs one case of `gpu_cases` and nothing else: for profilers, for compute-sanitizer, and for people.

    python profile_one.py "prefill 4096x6144x4096 bf16 col 8B QKV"    # a name as `gpu.py` prints it, or a part of one
    python profile_one.py 4096x4096x4096:bf16:col --count 3           # a product
    ncu --clock-control none -k regex:portmm --set full python profile_one.py squares
    compute-sanitizer --tool racecheck python profile_one.py --tiny attention
    python profile_one.py --list

The case is made, computed once to compile and to check it against float64, and then so many times; each time is
printed. Under a profiler give `--quick`, by which it is neither checked nor timed, and its operands do not rotate.
"""

from __future__ import annotations

import argparse
import json
import sys

import gpu
import gpu_cases
import gpu_families
from gpu_peers import NoPeers


def known(*, tiny=False):
    """All cases by name."""
    return {x.name: x for x in (gpu_cases.tiny() if tiny else gpu_cases.cases())}


def case_of(text, *, tiny=False):
    """The case of a name, or of a part of one, or a product as MxNxK:type:layout of B.

    Raises:
        SystemExit: there is none.
    """
    if text.count(":") == 2:
        return gpu.product(text)
    every = known(tiny=tiny)
    found = every.get(text) or next((x for name, x in every.items() if text in name), None)
    if found is None:
        raise SystemExit(f"no case is called {text!r}; --list names all")
    return found


def run(on, case, *, count, quick, l2=1):
    """Compute a case; its seconds, and its error over what it may be."""
    work = gpu_families.made(on, NoPeers(), case, l2)
    found = work.ours(work.sets[0])
    on.wait()
    said = {"name": case.name, **work.choice}
    if not quick:
        said["error"] = float(work.share(found, work.sets[0]))
    del found
    taken = []
    for i in range(count):
        if quick:
            work.ours(work.sets[i % len(work.sets)])
        else:
            taken.append(on.seconds([lambda i=i: work.ours(work.sets[i % len(work.sets)])]))
    on.wait()
    return said | {"seconds": taken, "tflops": [work.flops / x / 1e12 for x in taken if x > 0]}


def main(argv=None, on=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", nargs="?", default="squares")
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="neither checked nor timed")
    parser.add_argument("--tiny", action="store_true", help="of the small cases that checks take")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args(argv)
    if given.list:
        print("\n".join(known(tiny=given.tiny)))
        return 0
    on = on or gpu.opened(given.device, peers=False)[0]
    level = gpu.machine_of(on).target.level("L2")
    said = run(on, case_of(given.case, tiny=given.tiny), count=given.count, quick=given.quick,
               l2=level.bytes if level and not given.quick else 1)  # fmt: skip
    print(json.dumps(said, indent=1))
    return 0 if said.get("error", 0.0) <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
