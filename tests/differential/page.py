"""docs/compatibility.md, generated from the stored results."""

from __future__ import annotations

from tests.conftest import ROOT

PATH = ROOT / "docs" / "compatibility.md"


def make_page() -> str:
    return ""
