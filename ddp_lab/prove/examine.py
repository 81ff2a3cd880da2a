"""The checks that one process can make of a job: `python -m ddp_lab.prove.examine`.

Processes and accumulation steps are played here one after the other, by the batch plan and the
steps of a real run. The real processes are in `real_runs`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from ddp_lab.doctor.findings import FAILURE, Finding, failure
from ddp_lab.prove import causes
from ddp_lab.prove.answer import Examined
from ddp_lab.prove.bench import Bench
from ddp_lab.prove.causes import Cause
from ddp_lab.prove.data_checks import augmentation, order_of_samples
from ddp_lab.prove.gradient_checks import UNEVEN, WHOLE, GradientChecks
from ddp_lab.prove.progress import Deadline
from ddp_lab.prove.score_checks import CHECK as EVALUATION
from ddp_lab.prove.score_checks import ScoreCheck
from ddp_train.assembly.data_sets import open_datasets
from ddp_train.config.freeze import FILE, load_frozen
from ddp_train.config.program import import_from_working_folder
from ddp_train.data.datasets import digests
from ddp_train.errors import ConfigError, LaunchError, TaskError
from ddp_train.linux import end_with_parent
from ddp_train.models.put_back import leaving_nothing
from ddp_train.options.schema import Config
from ddp_train.performance.switches import set_process_flags
from ddp_train.text import first_line

PRECISIONS = ("fp64", "fp32")
"""The first one that the job can compute in: a model may have float32 written into it."""


def examine(
    config: Config,
    samples_per_micro_batch: int = 0,
    folder: Path | None = None,
    seconds: float = 600.0,
) -> Examined:
    """Make all checks of one process.

    config: as `configs.for_proof` makes it.
    samples_per_micro_batch: of the job itself, for messages.
    folder: gets the gradients of one process.

    Errors of the job itself are findings: the proof says that it does not begin, and why.
    """
    deadline = Deadline(seconds)
    problem: Exception | None = None
    for precision in PRECISIONS:
        tuning = replace(config.tuning, precision=precision)
        try:
            bench = Bench(replace(config, tuning=tuning), samples_per_micro_batch)
            with leaving_nothing("a trial", bench.parts):
                bench.division.compute(0)
        except Exception as error:  # noqa: BLE001  the job is the user's: whatever it raises is its finding
            problem = error
            if isinstance(error, LaunchError) or not isinstance(error, RuntimeError):
                break
        else:
            return check_all(bench, folder, deadline)
    assert problem, "a precision without a problem returns"
    return Examined([_does_not_begin(problem)])


def check_all(bench: Bench, folder: Path | None, deadline: Deadline) -> Examined:
    """The findings of a job that begins. folder: see `examine`."""
    plan = bench.plan
    train = bench.splits.train
    augmented = augmentation(bench.splits, plan, bench.initial_data_state).named("augmentation")
    samples_differ = augmented.status == FAILURE
    made_again = train if samples_differ else open_datasets(bench.config).train
    order = order_of_samples(train, made_again, plan).named("order of samples")
    checks = GradientChecks(bench, deadline)
    if folder:
        checks.save(folder)
    if samples_differ:
        gradients = checks.findings_without_samples()
    else:
        gradients = checks.findings()
    findings = [order, augmented, *gradients]
    gradients_failed = any(
        finding.check == WHOLE and finding.status == FAILURE for finding in findings
    )
    # if gradients differ, scores of other batches differ for the same reason
    scores = partial(ScoreCheck(bench).finding, by_size=not gradients_failed)
    findings.append(deadline.check(EVALUATION, scores))
    return Examined(
        findings,
        precision=bench.precision,
        draws=sorted(bench.division.met),
        unfixed=bench.division.unfixed,
        deciding_state=checks.deciding_state,
        data_digests=digests(train),
    )


def _does_not_begin(error: Exception) -> Finding:
    """The finding of an error of the job itself."""
    text = "; ".join(error.problems) if isinstance(error, ConfigError) else first_line(error)
    if "that is a mean" in text or "would depend on the number of processes" in text:
        return causes.finding(Cause("mean", text, causes.SUMS)).named(UNEVEN)
    if "units_are_samples is True" in text:
        return causes.finding(Cause("units", text, causes.UNITS)).named(UNEVEN)
    if isinstance(error, LaunchError):
        check = UNEVEN if isinstance(error, TaskError) else "job"
        return failure(text, error.remedy, error.exit_code, cause="job").named(check)
    detail = f"{type(error).__name__}: {text}{causes.place_of(error)}"
    return failure(detail, "correct the line that raises", cause="job").named("job")


def main() -> None:
    """`python -m ddp_lab.prove.examine FOLDER SECONDS SAMPLES_PER_MICRO_BATCH`.

    Reads config.yaml of the folder, and leaves its answer there.
    """
    end_with_parent()
    import_from_working_folder()
    folder = Path(sys.argv[1])
    seconds = float(sys.argv[2])
    samples_per_micro_batch = int(sys.argv[3])
    config = load_frozen((folder / FILE).read_text())
    set_process_flags(
        threads=int(config.launch.threads_per_process),
        deterministic=True,
        cudnn_benchmark=False,
        tf32=False,
    )
    examine(config, samples_per_micro_batch, folder, seconds).write(folder)


if __name__ == "__main__":
    main()
