"""Keys of a sweep that presets set, as overrides of its command line.

Hydra reads the section `hydra` of a preset itself. A plan that knew the command line alone would
miss keys that are swept there, and the sweeper and the launcher that are chosen there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ddp_train.config.hydra_errors import composition_errors
from ddp_train.config.program import PRESETS, Program
from ddp_train.sweeps.composed_sweep import composed_sweep
from ddp_train.sweeps.overrides import is_of_hydra, key_of
from ddp_train.sweeps.sweeper import KNOWN_SWEEPERS, LAUNCHER, PARAMS, SWEEPER
from ddp_train.text import dotted, shown

PARAMS_SECTION = PARAMS.rstrip(".")
NO_PARAMS = f"{PARAMS_SECTION}=null"
"""For Hydra, where its parameters are words already."""
CHOICES = {LAUNCHER: "basic", SWEEPER: "basic", f"{SWEEPER}/pruner": "none"}
"""Groups that a plan must know, and their options by default."""
SETTINGS = {
    "hydra.sweeper.n_trials": (None,),
    "hydra.sweeper.direction": (None, "minimize"),
    "hydra.launcher.gpus_per_trial": (None,),
    "hydra.launcher.processes_at_once": (None, 1),
    "hydra.launcher.devices": (None,),
}
"""Keys that a plan must know, and their values by default."""


@dataclass(frozen=True)
class SweepWords:
    """The words of a sweep, those of its presets included."""

    words: list[str]
    params_are_words: bool = False
    """Whether `hydra.sweeper.params` is among the words, and must be taken from Hydra."""
    drawn: frozenset[str] = frozenset()
    """Keys that a sweeper other than ours draws, as presets say."""


def with_words_of_presets(program: Program, words: list[str]) -> SweepWords:
    """Put what presets say of the sweep before the words that were typed, which win.

    A mistake in a preset is left to the checks that follow.
    """
    keys = {key_of(word) for word in words}
    if not keys & {*PRESETS}:
        return SweepWords(words)
    asked = [
        word
        for word in words
        if (is_of_hydra(word) and not f"{key_of(word)}.".startswith(PARAMS))
        or program.is_group(key_of(word))
    ]
    try:
        with composed_sweep(program, asked) as composed:
            pass
        of_presets = [*_choices(composed, keys), *_settings(composed, keys)]
    except composition_errors():
        return SweepWords(words)
    params = _params(composed)
    sweeper = str(composed.hydra.runtime.choices.get(SWEEPER))
    if params and sweeper not in KNOWN_SWEEPERS:
        return SweepWords([*of_presets, *words], drawn=frozenset(params))
    swept = [f"{key}={value}" for key, value in params.items()]
    return SweepWords([*of_presets, *swept, *words], params_are_words=bool(params))


def _choices(composed: DictConfig, typed: set[str]) -> list[str]:
    """Options that a preset chooses by `override /hydra/launcher: pool`."""
    chosen = composed.hydra.runtime.choices
    return [
        f"{group}={chosen[group]}"
        for group, default in CHOICES.items()
        if group not in typed and chosen.get(group) not in (None, default)
    ]


def _settings(composed: DictConfig, typed: set[str]) -> list[str]:
    found = []
    for key, defaults in SETTINGS.items():
        value: Any = OmegaConf.select(composed, key)
        if key not in typed and value not in defaults:
            found.append(f"{key}={shown(_plain(value))}")
    return found


def _params(composed: DictConfig) -> dict[str, str]:
    """`hydra.sweeper.params`: the keys, dotted, and their values in Hydra's grammar."""
    params = _plain(OmegaConf.select(composed, PARAMS_SECTION)) or {}
    return {key.lstrip("+"): shown(value) for key, value in dotted(params).items()}


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
