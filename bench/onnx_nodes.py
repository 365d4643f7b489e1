"""Run ONNX's own tests of operators by `portmm.onnx`, and write their table to docs/onnx-operators.md."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))

import cover  # noqa: E402
import onnx  # noqa: E402
import onnx_cases  # noqa: E402

from portmm.build import compiler  # noqa: E402
from portmm.util.console import progress  # noqa: E402

PAGE = HERE.parent / "docs" / "onnx-operators.md"
VERDICTS = ("passed", "rounded", "failed", "not offered")
TEXT = """# Operators of ONNX

Made by `python bench/onnx_nodes.py` with onnx {version}: its tests of single operators, run by kernels where there are
kernels. *rounded* are results in float16 and bfloat16 that differ by at most two units in the last place, since kernels
compute in float32 and round once where the expected results were rounded after each operator. *expanded functions* are
tests of operators as the functions of simpler ones that define them.

{total}

| operator | {head} |
| --- | {rule} |
{rows}

Not offered:

{missing}
"""


def main() -> None:
    """Run all cases, and write the table; status 1 if a case fails."""
    compiler._BASE = cover.unoptimised(compiler._BASE)  # noqa: SLF001 - many kernels, each of which runs once
    cases = onnx_cases.cases()
    outcomes = []
    with progress("operators") as step, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, case in enumerate(cases):
            step(i, len(cases), case.name)
            outcomes.append(onnx_cases.outcome(case))
    counts: dict[str, Counter[str]] = {}
    for x in outcomes:
        counts.setdefault(x.operator, Counter())[x.verdict] += 1
    total = Counter(x.verdict for x in outcomes)
    rows = [f"| {op} | {' | '.join(str(n[v] or '') for v in VERDICTS)} |" for op, n in sorted(counts.items())]
    reasons = Counter(
        f"- {x.operator}: {x.why.partition(': ')[2] or x.why}" for x in outcomes if x.verdict == "not offered"
    )
    PAGE.write_text(
        TEXT.format(
            version=onnx.__version__, total=", ".join(f"{total[v]} {v}" for v in VERDICTS) + ".",
            head=" | ".join(VERDICTS), rule=" | ".join(["--:"] * len(VERDICTS)), rows="\n".join(rows),
            missing="\n".join(f"{text} ({n})" for text, n in sorted(reasons.items())),
        )
    )  # fmt: skip
    print(PAGE, dict(total))
    for x in outcomes:
        if x.verdict == "failed":
            print(f"{x.name}: {x.why}")
    sys.exit(1 if total["failed"] else 0)


if __name__ == "__main__":
    main()
