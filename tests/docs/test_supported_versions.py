"""The page about supported versions has the recorded results, and they agree with the requirements of the package."""

import json
from pathlib import Path
from typing import Any

from benchmarks.diffusers_versions import RESULTS, WORKING, render_table

ROOT = Path(__file__).parents[2]
REPORT: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "supported-versions.md").read_text(encoding="utf-8")
    assert "\n".join(render_table(REPORT)) in page


def test_every_placed_pipeline_works() -> None:
    failures = {
        (environment, name, device): cell["placed"]["error"]
        for environment, entry in REPORT["environments"].items()
        for name, row in entry["rows"].items()
        for device, cell in row.get("devices", {}).items()
        if cell["placed"]["state"] not in WORKING
    }
    assert failures == {}
