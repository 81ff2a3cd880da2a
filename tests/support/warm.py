"""Imported last by the fork server of tests/support/ranks.py: what most ranks need is there, and is
not collected in each."""

from __future__ import annotations

import gc
import importlib

from ddp_train.config.bind import bind
from ddp_train.options.registry import OPTIONS

for _name in (
    "pytest",
    "hypothesis",
    "PIL.Image",
    "sklearn.metrics",
    "torchvision",
    "tests.support.commands",
    "tests.support.jobs",
):
    importlib.import_module(_name)
for _group, _options in OPTIONS.items():  # the types of each section are made once
    for _option in _options:
        bind({_group: {"name": _option}})
gc.collect()
gc.freeze()  # else each rank looks through 700,000 objects at its end, and copies their pages
