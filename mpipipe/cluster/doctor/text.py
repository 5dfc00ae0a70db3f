"""A diagnosis as one screen of text."""

from __future__ import annotations

import textwrap

from mpipipe.cluster.doctor.facts import Diagnosis, Finding
from mpipipe.planner.sizes import counted

WIDTH = 110  # of texts; a line to paste is not broken
INDENT = " " * 11


def screen(diagnosis: Diagnosis) -> str:
    lines, section = [], ""
    for finding in diagnosis.findings:
        if finding.section != section:
            section = finding.section
            lines.append(section)
        lines.append(_told(finding))
    notes = sum(finding.level == "note" for finding in diagnosis.findings)
    found = f"{counted(diagnosis.problems, 'problem')}, {counted(notes, 'note')}"
    return "\n".join([*lines, f"{found}, after {diagnosis.seconds:.1f} s"])


def _told(finding: Finding) -> str:
    text = textwrap.fill(
        finding.text, WIDTH, initial_indent=f"  {finding.level:9}", subsequent_indent=INDENT,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    fix = finding.fix.replace("\n", f"\n{INDENT}")
    return f"{text}\n{INDENT}fix: {fix}" if fix else text
