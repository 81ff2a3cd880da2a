"""Hydra's parser of overrides under `python -O`, which leaves assert statements out."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

PARSER = "hydra.core.override_parser.overrides_parser"
VISITOR = "hydra.core.override_parser.overrides_visitor"
CLASS = "HydraOverrideVisitor"


def keep_asserts() -> None:
    """Let Hydra parse as it does without -O.

    Some of its assert statements advance the parser (Hydra 1.3): without them `range(0,3)`, every
    other function and a dict fail with an AttributeError.
    """
    if not sys.flags.optimize:
        return
    parser = importlib.import_module(PARSER)
    plain = importlib.import_module(VISITOR)
    path = Path(str(plain.__file__))
    with_asserts = ModuleType(VISITOR)
    code = compile(path.read_text("utf-8"), str(path), "exec", dont_inherit=True, optimize=0)
    exec(code, with_asserts.__dict__)
    setattr(parser, CLASS, getattr(with_asserts, CLASS))
