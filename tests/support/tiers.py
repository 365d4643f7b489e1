"""Which tests a session runs, and what it says and keeps of the runs of kernels in them.

PORTMM_TESTS is `fast` (unless it says otherwise), `rest`, `full` or `all`; see CONTRIBUTING.md. Marks say where a test
belongs:

    @pytest.mark.rest("why")   the rest has it: it asks other tools than a user has, or takes long for what it finds
    @pytest.mark.thin(n)       the fast tier has each n-th of its cases, the rest the others

`THIN` does the same for all functions of modules whose many cases take most of the time.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import cover
import passed
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


THIN = {
    2: "fuse/test_fuse_device kernels/test_device_codes kernels/test_grid_attention kernels/test_mma_attention "
    "kernels/test_mma_types meaning/test_accuracy meaning/test_amx meaning/test_device_accuracy meaning/test_fused "
    "meaning/test_meaning meaning/test_two_rows ops/test_attention ops/test_attention_classes "
    "ops/test_attention_meaning ops/test_determinism ops/test_device_calls ops/test_folded ops/test_grouped_device "
    "ops/test_prepack ops/test_rows_on_device ops/test_scaled_device ops/test_without_compiler schedule/test_cost_tape "
    "schedule/test_schedule schedule/test_textbook",
    3: "meaning/test_narrow",
}
"""Of each function of these modules, the fast tier has each n-th of the cases that its mark leaves."""
_THIN = {f"{name}.py": n for n, names in THIN.items() for name in names.split()}


def is_fast(item: pytest.Item, number: int) -> bool:
    """The fast tier has a test, which is the case of its function with a number."""
    thin = item.get_closest_marker("thin")
    elsewhere = item.get_closest_marker("rest") or item.get_closest_marker("emulated")
    module = "/".join(item.nodeid.partition("::")[0].split("/")[-2:])
    return elsewhere is None and number % ((thin.args[0] if thin else 1) * _THIN.get(module, 1)) == 0


def chosen(items: Iterable[pytest.Item], tier: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests of a tier, and the others."""
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    cases: dict[str, int] = {}
    for item in items:
        function = item.nodeid.partition("[")[0]
        number = cases[function] = cases.get(function, -1) + 1
        wanted = tier in ("full", "all") or is_fast(item, number) == (tier == "fast")
        (kept if wanted else left).append(item)
    return kept, left


class Tiers:
    """Leaves out the tests of other tiers; sums up, and keeps, what workers know of the runs of kernels."""

    def __init__(self, config: pytest.Config, path: Path = passed.FILE) -> None:
        if cover.TIER not in cover.TIERS:
            raise pytest.UsageError(f"PORTMM_TESTS={cover.TIER!r} is none of {', '.join(cover.TIERS)}")
        self.config, self.path = config, path
        self.record = config.getoption("--record")
        if self.record:
            if cover.EVERY_RUN:
                raise pytest.UsageError(f"--record keeps what a tier has found: fast and rest, not {cover.TIER}")
            passed.LEDGER.bounded = False
        self.failed = False

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        items[:], left = chosen(items, cover.TIER)
        if left:
            config.hook.pytest_deselected(items=left)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:  # noqa: ARG002 - as pytest calls it
        self.failed = False
        answer = yield
        passed.LEDGER.end(well=not self.failed)
        return answer

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Any:
        report = yield
        self.failed = self.failed or not report.passed
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        ledger = passed.LEDGER
        if hasattr(session.config, "workeroutput"):
            counts = (ledger.counts.repeated, ledger.counts.unchanged, ledger.counts.left_out)
            session.config.workeroutput["runs"] = json.dumps([counts, sorted(ledger.passed)])

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker of xdist has ended, or died."""
        if "runs" in getattr(node, "workeroutput", {}):
            counts, keys = json.loads(node.workeroutput["runs"])
            passed.LEDGER.counts.add(counts)
            passed.LEDGER.passed.update(keys)

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        if hasattr(self.config, "workerinput"):
            return  # a worker has its own share only; the session that started it has all
        counts = passed.LEDGER.counts
        if counts != passed.Counts():
            terminalreporter.write_line(counts.said())
        if self.record:
            # A session that was cut short has not seen what it would drop.
            ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
            whole = ended and not self.config.getoption("maxfail") and _everything(self.config, self.path.parent)
            tiers = passed.read(self.path)
            before = frozenset() if whole else tiers.get(cover.TIER, frozenset())
            tiers[cover.TIER] = passed.LEDGER.passed | before
            passed.write(tiers, self.path)
            terminalreporter.write_line(f"{len(tiers[cover.TIER])} runs of kernels are recorded in {self.path}")


def _everything(config: pytest.Config, folder: Path) -> bool:
    """The session was asked for all tests in a folder."""
    if config.getoption("keyword") or config.getoption("markexpr"):
        return False
    return all(folder.is_relative_to(config.invocation_params.dir / x.partition("::")[0]) for x in config.args)
