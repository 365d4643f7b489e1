"""Measure a suite and store it as bench/results/CHIP-THREADSt-f32.json, or -SUITE.json for narrow types.

    python bench/run_suite.py [--suite full] [--threads N] [--target avx2] [--seed N] [--budget SECONDS] [--plot]

The README's tables are made from these files by `bench/report.py`.
"""

import argparse
from pathlib import Path

from rich.console import Console

from portmm.comparison import cases, compare
from portmm.comparison.pictures import plot
from portmm.comparison.text import terminal

RESULTS = Path(__file__).parent / "results"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default="full")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--target", help="an ISA or chip to hold everybody to")
    parser.add_argument("--budget", type=float, default=1800.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the shapes of a random suite")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="instead of the name in bench/results")
    parser.add_argument("--plot", action="store_true", help="a PNG beside the JSON")
    options = parser.parse_args()
    console = Console(stderr=True)
    with console.status("starting") as status:
        report = compare(
            options.suite,
            threads=options.threads,
            target=options.target,
            rounds=options.rounds,
            budget_s=options.budget,
            seed=options.seed,
            progress=lambda done, total, text: status.update(f"{done}/{total} {text}"),
        )
    forced = f"-{report.isa}" if report.isa else ""
    some = cases(options.suite, options.seed)
    drawn = any(case.group.startswith("random") for case in some)
    kind = options.suite.replace(",", "-") if drawn or any(case.narrow for case in some) else "f32"
    kind += f"-seed{options.seed}" if drawn else ""
    path = options.output or RESULTS / f"{report.machine}{forced}-{report.threads}t-{kind}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report.to_json())
    if options.plot:
        plot(report, path.with_suffix(".png"))
    Console().print(terminal(report))
    console.print(f"wrote {path}")


if __name__ == "__main__":
    main()
