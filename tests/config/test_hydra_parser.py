"""Overrides mean the same under `python -O`."""

from __future__ import annotations

import subprocess
import sys

WORDS = ["a=range(0,3)", "a={x:1,y:[2,3]}", "a=choice(1,2)", "a=glob(*)", "a=interval(0,1)", "a=1"]
PARSED = """
import sys
from ddp_train.config.hydra_parser import keep_asserts
keep_asserts()
from hydra.core.override_parser.overrides_parser import OverridesParser
parser = OverridesParser.create()
print([repr(parser.parse_override(word).value()) for word in sys.argv[1:]], file=sys.stdout)
"""


def parsed(*options: str) -> str:
    command = [sys.executable, *options, "-c", PARSED, *WORDS]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_overrides_are_parsed_alike_without_asserts() -> None:
    assert parsed("-O") == parsed()
