"""Configs that tests compose, and the messages about wrong ones."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from ddp_train.checkpoints.layout import digest_of
from ddp_train.config.composition import read_config
from ddp_train.config.overrides import read_overrides
from ddp_train.config.prepare import prepare
from ddp_train.config.presets import compose_options
from ddp_train.config.program import Program
from ddp_train.errors import ConfigError
from ddp_train.options.schema import Config
from tests.support.commands import PROGRAM, run

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "ddp_train/conf"
FILES = sorted(
    path.relative_to(CONF).with_suffix("").as_posix()
    for path in CONF.glob("*/*.yaml")
    if path.parent.name != "study"  # not composed into a run: tests/laboratory/test_variants.py
)


def composed(*words: str) -> Config:
    """The config of some words; they are right."""
    config, problems = read_config(PROGRAM, read_overrides(PROGRAM, list(words)))
    assert problems == []
    return config


COMPOSED: dict[str, bytes] = {}
"""Pickled: OmegaConf takes 1 ms to load a config, and 7 to copy it."""


def composed_once(program: Program, arguments: list[str]) -> Any:
    """In place of `compose_options`, which takes 0.2 s: Hydra composes each choice of our own
    options once in a test process. Presets of a user, which tests write, it composes each time."""
    if program.own:
        return compose_options(program, arguments)
    key = shlex.join([str(program.presets), *arguments])
    if key not in COMPOSED:
        COMPOSED[key] = pickle.dumps(compose_options(program, arguments))
    return pickle.loads(COMPOSED[key])


def problems_of(*words: str) -> list[str]:
    """The problems that the entry reports for some words; they are wrong."""
    with pytest.raises(ConfigError) as caught:
        prepare(PROGRAM, list(words), None)
    return caught.value.problems


def accepted(*words: str) -> None:
    """Prepares a run, which may use its directory again."""
    prepared = prepare(PROGRAM, list(words), None)
    assert prepared.lock
    prepared.lock.release()


def launch(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command, in the current folder."""
    return run(*words, cwd=Path.cwd(), env=env)


def checkpoint_of(run_dir: Path, *words: str) -> Path:
    """A run that looks as if it had been trained with these words, up to its manifest."""
    config = prepare(PROGRAM, [*words, f"run_dir={run_dir}"], None).config
    place = run_dir / "checkpoints/step_00000010"
    place.mkdir(parents=True)
    write_manifest(
        place, {"step": 10, "config": json.loads(json.dumps(dataclasses.asdict(config)))}
    )
    return place


def write_manifest(place: Path, manifest: Any) -> None:
    (place / "manifest.json").write_text(json.dumps({**manifest, "sha256": digest_of(manifest)}))


def own_presets(**contents: str) -> Program:
    """With presets of one's own, `group/option` and its content, in conf/ of the working folder."""
    for name, content in contents.items():
        path = Path("conf", name.replace("__", "/")).with_suffix(".yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return dataclasses.replace(PROGRAM, own=Path("conf"))


WORDS = st.from_regex(r"[b-d]{1,5}", fullmatch=True)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
