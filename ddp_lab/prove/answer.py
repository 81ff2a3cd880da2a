"""The findings of the checks of one process, and the file in which it leaves them. Torch-free."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ddp_lab.doctor.findings import FAILURE, Finding
from ddp_train.resilience.whole_files import write_json

ANSWER = "examined.json"
GRADIENTS = "one_process.safetensors"
"""The gradients of one process, with which those of real processes are compared."""


@dataclass
class Examined:
    """The findings of a job, and what its real runs must know."""

    findings: list[Finding] = field(default_factory=list)
    precision: str = ""
    """The precision that the checks computed in; empty if the job does not begin."""
    draws: list[str] = field(default_factory=list)
    """Functions in the model that drew random numbers, and were fixed."""
    unfixed: bool = False
    """The model draws random numbers of torch that cannot be fixed."""
    deciding_state: list[str] = field(default_factory=list)
    """State outside of buffers that decides the loss, and may come from the rows of all processes:
    only several processes can tell."""
    data_digests: dict[str, str] = field(default_factory=dict)
    """Digests of the samples that train; empty if they are not known."""

    def failed_checks(self) -> list[str]:
        return [finding.check for finding in self.findings if finding.status == FAILURE]

    def causes(self) -> list[str]:
        """The kinds of causes of all that does not hold, each once."""
        causes = [finding.numbers.get("cause") for finding in self.findings]
        return list(dict.fromkeys(cause for cause in causes if cause))

    def write(self, folder: Path) -> None:
        write_json(folder / ANSWER, asdict(self))


def read_answer(folder: Path) -> Examined | None:
    """The findings that the process left; None if it left none."""
    path = folder / ANSWER
    if not path.is_file():
        return None
    values = json.loads(path.read_text())
    findings = [Finding(**finding) for finding in values.pop("findings")]
    return Examined(findings, **values)
