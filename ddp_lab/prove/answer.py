"""What the checks of one process found, and the file in which the process leaves it. Torch-free."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddp_lab.doctor.findings import FAILURE, Finding
from ddp_train.resilience.whole_files import write_json

ANSWER = "examined.json"
GRADIENTS = "one_process.safetensors"
"""The gradients of one process, with which those of real processes are compared."""


@dataclass
class Examined:
    """The findings of a job, and what its real runs must know."""

    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def failed_checks(self) -> list[str]:
        return [finding.check for finding in self.findings if finding.status == FAILURE]

    def causes(self) -> list[str]:
        """The kinds of causes of all that does not hold, each once."""
        causes = [finding.numbers.get("cause") for finding in self.findings]
        return list(dict.fromkeys(cause for cause in causes if cause))

    def write(self, folder: Path) -> None:
        values = {"findings": [asdict(one) for one in self.findings], "facts": self.facts}
        plain = json.loads(json.dumps(values))
        write_json(folder / ANSWER, plain)


def read_answer(folder: Path) -> Examined | None:
    """What the process left; None if it left nothing."""
    path = folder / ANSWER
    if not path.is_file():
        return None
    values = json.loads(path.read_text())
    return Examined([Finding(**finding) for finding in values["findings"]], values["facts"])
