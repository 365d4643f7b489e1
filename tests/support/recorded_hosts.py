"""Hosts that were recorded elsewhere: what detection reads there, and what it is to find."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from portmm.host.host_probe import Snapshot

if TYPE_CHECKING:
    from pathlib import Path


def recorded(path: Path) -> tuple[Snapshot, dict]:
    """A host's snapshot, and the expected findings."""
    data = json.loads(path.read_text())
    shot = {**data["snapshot"], "affinity": tuple(data["snapshot"]["affinity"])}
    return Snapshot(**shot), data["expect"]
