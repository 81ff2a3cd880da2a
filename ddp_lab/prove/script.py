"""`ddp-train prove train.py`: does a script of `ddp_train.session` give the same result on any
number of processes? Torch-free."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from safetensors import safe_open

from ddp_lab.prove.tolerances import CLEAR_GRADIENT, SCRIPT_ALLOWED, TINY, WEIGHTS_ALLOWED
from ddp_train.distributed.child_environments import proof_environment
from ddp_train.distributed.environment import (
    BY_LOOP,
    BY_OPTIMIZER,
    DRAWS,
    GRADIENTS,
    world_from_environment,
)
from ddp_train.errors import ConfigError
from ddp_train.resilience.preemption import SAVED
from ddp_train.text import counted

NUMBERS_OF_PROCESSES = (1, 3)
OTHER_DRAWS = 1000
"""A rank whose random draws no run has that is compared."""
DIFFERS = 70
MOST_SHOWN = 5
LAST_LINES = 20
USE = "use ddp-train prove train.py [ARGUMENT ...], or ddp-train prove -m MODULE [ARGUMENT ...]"
ROUNDING_OF_FLOAT32 = 1e-5
IN_FLOAT32 = "if a part of the model is in float32, so small a difference may be rounding"
DRAWN = (
    "each process draws its own random numbers, so the runs cannot be compared. Use"
    " ddp_train.dropout and ddp_train.noise_like, or turn dropout and noise off for this command"
)
CAUSES = (
    "a result over the batch (a mean, topk, argmax, roll, negatives, a queue, padding to the"
    " largest, a collate_fn that draws or mixes) covers the samples of one process only. For the"
    " rows of all processes use rows, own = ddp_train.all_gather(rows)"
)
DRAWN_WITHOUT_EFFECT = (
    "each process also draws its own random numbers, but other random numbers gave the same result"
)


@dataclass(frozen=True)
class Record:
    """The gradients, changes of weights and buffers that one run of the script has recorded."""

    arrays: Mapping[str, np.ndarray]
    """These by their names, as `update 1 layer.weight`."""
    draws_by_process: bool

    @property
    def precision(self) -> str:
        """fp64 if all gradients are in float64, else fp32."""
        gradients = [array for name, array in self.arrays.items() if name.startswith("update")]
        return "fp64" if all(array.dtype == np.float64 for array in gradients) else "fp32"


@dataclass(frozen=True)
class Difference:
    name: str
    share: float
    """The largest difference, as a part of the largest number there."""


class RunFailedError(Exception):
    """A run of the script has failed, or written nothing."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def prove_script(arguments: Sequence[str]) -> int:
    """Run the first updates of a script on 1 and on 3 processes, and compare their gradients.

    arguments: of python.

    Returns the exit code: 0 if they are the same, 70 if not, that of the script if it fails. Raises
    ConfigError.
    """
    check_arguments(arguments)
    folder = Path(tempfile.mkdtemp(prefix="ddp_train_prove_"))
    try:
        one, several = [run_script(arguments, count, folder) for count in NUMBERS_OF_PROCESSES]
        allowed = SCRIPT_ALLOWED[one.precision]
        differences = differences_of(one, several, allowed)
        cause = CAUSES
        if several.draws_by_process and differences[0].share > allowed:
            others = run_script(arguments, 1, folder, OTHER_DRAWS)
            cause = cause_beside_draws(one, others, allowed)
    except RunFailedError as error:
        print(f"{error}\n  output of the script: {folder}")
        return error.exit_code
    print(verdict(differences, cause, allowed))
    if differences[0].share > allowed:
        print(f"  output of both runs: {folder}")
        return DIFFERS
    shutil.rmtree(folder)
    return 0


def check_arguments(arguments: Sequence[str]) -> None:
    """Raises ConfigError if they do not name a script or a module."""
    if not arguments:
        raise ConfigError([f"prove: no script named; {USE}"])
    first = arguments[0]
    if first.startswith("-"):
        if first == "-m" and len(arguments) > 1:
            return
        raise ConfigError([f"prove: {first} is not a script; {USE}"])
    if not Path(first).is_file():
        hint = ""
        if "=" in first:
            hint = "; for a run by config use mode=prove in place of prove"
        raise ConfigError([f"prove: there is no script {first}{hint}; {USE}"])
    if world_from_environment():
        raise ConfigError(
            ["prove: starts its own processes; run the same command without torchrun"]
        )


def cause_beside_draws(one: Record, others: Record, allowed: float) -> str:
    """The causes to look for in a script that draws random numbers by process.

    others: the record of one process with other draws, which may have no effect.
    """
    if differences_of(one, others, allowed)[0].share > allowed:
        return DRAWN
    return f"{CAUSES}\n  {DRAWN_WITHOUT_EFFECT}"


def run_script(
    arguments: Sequence[str], processes: int, folder: Path, first_draws: int = 0
) -> Record:
    """Run the first updates on so many processes, on CPUs. Raises RunFailedError.

    first_draws: as in `proof_environment`.
    """
    where = f"on {counted(processes, 'process')}"
    name = f"{processes}"
    if first_draws:
        where += ", with other random numbers"
        name += "_other_draws"
    print(f"{where}: {' '.join(arguments)}", flush=True)
    run_dir = folder / name
    output = folder / f"output_{name}.txt"
    with output.open("w") as stream:
        code = subprocess.run(
            [sys.executable, *arguments],
            env=proof_environment(run_dir, processes, first_draws),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    file = run_dir / GRADIENTS
    if code not in (0, SAVED):
        last = output.read_text(errors="replace").splitlines()[-LAST_LINES:]
        raise RunFailedError("\n".join([*last, f"{where} it ended with {code}"]), code)
    record = read(file) if file.exists() else None
    if record is None or not any(name.startswith("update") for name in record.arrays):
        raise RunFailedError(
            f"{where} the script made no update of weights: prove needs a script with a"
            " ddp_train.session that passes its optimizer to run.resume",
            DIFFERS,
        )
    return record


def read(file: Path) -> Record:
    with safe_open(file, "numpy") as reader:
        arrays = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
        draws = (reader.metadata() or {}).get(DRAWS) == "1"
    return Record(arrays, draws)


def differences_of(one: Record, several: Record, allowed: float) -> list[Difference]:
    """The differences of all that was recorded: the first update first, then by size.

    allowed: what is rounding, and comes last.

    Relative to the largest number of the parameter, or a hundredth of the largest of its update:
    gradients that vanish, as those of a bias before batch norm, are rounding alone.
    """
    names = [*dict.fromkeys([*one.arrays, *several.arrays])]
    largest: dict[str, float] = {}
    for name in names:
        group = _group_of(name)
        for record in (one, several):
            largest[group] = max(largest.get(group, TINY), _largest(record.arrays.get(name)))
    found = []
    for name in names:
        first, second = one.arrays.get(name), several.arrays.get(name)
        scale = max(_largest(first), _largest(second), largest[_group_of(name)] / 100)
        if name.startswith(BY_OPTIMIZER):
            of_gradient = name.replace(BY_OPTIMIZER, "update")
            least = CLEAR_GRADIENT * max(
                _largest(one.arrays.get(of_gradient)), largest[_group_of(of_gradient)] / 100
            )
            first, second = _with_clear(first, second, one.arrays.get(of_gradient), least)
        share = _distance(first, second) / scale
        if name.startswith((BY_OPTIMIZER, BY_LOOP)) and share <= WEIGHTS_ALLOWED["fp64"]:
            share = 0.0
        found.append(Difference(name, share))
    return sorted(found, key=partial(_place_of, allowed=allowed))


def _with_clear(
    one: np.ndarray | None, other: np.ndarray | None, gradient: np.ndarray | None, least: float
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """An optimizer's changes of a parameter where its gradient is not less than `least`.

    None where a process has no gradient: that is told itself.
    """
    if one is None or other is None or gradient is None or one.shape != other.shape:
        return None, None
    is_clear = np.abs(gradient) >= least
    return one[is_clear], other[is_clear]


def _place_of(difference: Difference, allowed: float) -> tuple[bool, bool, int, str, float]:
    """A key that sorts differences beyond rounding first: by update, buffers last."""
    group = _group_of(difference.name)
    is_rounding = difference.share <= allowed
    if is_rounding:
        group = ""
    _, _, number = group.rpartition(" ")
    place = int(number) if number.isdigit() else 0
    return is_rounding, group == "buffer", place, group, -difference.share


def _group_of(name: str) -> str:
    """`update 1`, `weights after update 1` or `buffer`."""
    words = name.split(" ")
    return " ".join(words[:-1])


def _largest(array: np.ndarray | None) -> float:
    if array is None or not array.size:
        return 0.0
    finite = array[np.isfinite(array)]
    return float(np.abs(finite).max(initial=0.0))


def _distance(one: np.ndarray | None, other: np.ndarray | None) -> float:
    """The largest difference; a gradient that is not there is zero."""
    if one is None or other is None:
        return max(_largest(one), _largest(other))
    if one.shape != other.shape or not np.array_equal(np.isfinite(one), np.isfinite(other)):
        return float("inf")
    finite = np.isfinite(one)
    return float(np.abs(one[finite] - other[finite]).max(initial=0.0))


def verdict(differences: Sequence[Difference], cause: str, allowed: float) -> str:
    """Say whether the script gives the same on several processes as on one.

    differences: of each recorded array, the worst first; at least one.
    cause: what to look for if it does not.
    allowed: the largest difference that is rounding.
    """
    several = counted(NUMBERS_OF_PROCESSES[1], "process")
    worst = differences[0].share
    if worst <= allowed:
        return (
            f"the same on {several} as on 1: the gradients of {_updates_in(differences)} differ by"
            f" {worst:.1e} at most, which is rounding; later steps and scores were not compared"
        )
    beyond = [difference for difference in differences if difference.share > allowed]
    lines = [
        f"NOT the same on {several} as on 1, in {_updates_in(differences)} (allowed for rounding:"
        f" {allowed:g})"
    ]
    for difference in beyond[:MOST_SHOWN]:
        lines.append(f"  {difference.name} differs by {_percent(difference.share)}")
    if len(beyond) > MOST_SHOWN:
        lines.append(f"  and {len(beyond) - MOST_SHOWN} more")
    if max(difference.share for difference in beyond) < ROUNDING_OF_FLOAT32:
        lines.append(f"  {IN_FLOAT32}")
    lines.append(f"  {cause}")
    return "\n".join(lines)


def _updates_in(differences: Sequence[Difference]) -> str:
    """`update 1`, or `the first 3 updates`."""
    groups = {_group_of(difference.name) for difference in differences}
    groups = {group for group in groups if group.startswith("update")}
    return "update 1" if len(groups) == 1 else f"the first {len(groups)} updates"


def _percent(share: float) -> str:
    """`12.5%`, and `3e-06` where that would be 0.0%."""
    return f"{share:.1%}" if share >= 0.001 else f"{share:.0e}"
