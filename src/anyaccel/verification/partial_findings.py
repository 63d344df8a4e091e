"""Findings of a verification that is still running, stored in a file so that an interrupted run can continue."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anyaccel.backends.evidence_files import Finding, PipelineFinding

__all__ = ["PartialFindings"]


class PartialFindings:
    """The findings of a verification so far, one JSON object per line.

    The first line is a key with the device, the commit and the versions. If it differs from `key`, the
    file is from another verification and is replaced. Without a path, nothing is stored.
    """

    def __init__(self, path: Path | None, key: Mapping[str, Any], on_message: Callable[[str], None]) -> None:
        self.claims: tuple[Finding, ...] = ()
        self._path, self._lock = path, threading.Lock()
        self._pipelines: dict[str, list[PipelineFinding]] = {}
        lines = _read_lines(path)
        if lines[:1] == [{"key": dict(key)}]:
            self._load(lines[1:])
            on_message(f"continuing with {len(self._pipelines)} pipelines from {path}")
        elif path is not None:
            if lines:
                on_message(f"replacing {path}, which has findings of another device, commit or version")
            path.write_text(json.dumps({"key": dict(key)}) + "\n", encoding="utf-8")

    def _load(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if "claims" in line:
                self.claims = tuple(Finding(**finding) for finding in line["claims"])
            else:
                findings = [PipelineFinding(**finding) for finding in line["pipeline"]]
                self._pipelines[findings[0].recipe] = findings

    def find(self, recipe: str, modes: Sequence[str]) -> list[PipelineFinding]:
        """Return the findings for a recipe; empty if it was not tested in all of these modes."""
        findings = [finding for finding in self._pipelines.get(recipe, []) if finding.mode in modes]
        return findings if len(findings) == len(modes) else []

    def add_claims(self, claims: tuple[Finding, ...]) -> None:
        """Store the findings about the sheet."""
        if claims != self.claims:
            self._write({"claims": [asdict(finding) for finding in claims]})

    def add(self, findings: list[PipelineFinding]) -> None:
        """Store the findings about one recipe."""
        self._write({"pipeline": [asdict(finding) for finding in findings]})

    def _write(self, line: dict[str, Any]) -> None:
        if self._path is None:
            return
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _read_lines(path: Path | None) -> list[dict[str, Any]]:
    """Return the lines of the file; a last line that was not completely written is dropped."""
    if path is None or not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines
