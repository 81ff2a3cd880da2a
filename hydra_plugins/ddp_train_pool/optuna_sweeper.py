"""`hydra/sweeper=pool_optuna`: Optuna draws a job whenever a device is free.

It learns each result as it comes.
"""

# No `from __future__ import annotations`: Hydra runs this module before it is in sys.modules, where
# dataclasses look.

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import MISSING, DictConfig, OmegaConf

from hydra_plugins.ddp_train_pool._devices import PoolError
from hydra_plugins.ddp_train_pool.launcher import PoolLauncher

JOURNAL = "optuna.log"
"""In the directory of the sweep: Optuna's own format, which its dashboard reads."""
RESULT = "optimization_results.yaml"
SAMPLERS: dict[str, dict[str, Any]] = {
    "tpe": {"n_startup_trials": 10, "multivariate": False, "constant_liar": True},
    "random": {},
    "qmc": {},
}
PRUNERS: dict[str, dict[str, Any]] = {
    "none": {},
    "median": {"n_startup_trials": 5, "n_warmup_steps": 0, "interval_steps": 1, "n_min_trials": 1},
    "percentile": {
        "percentile": 25.0,
        "n_startup_trials": 5,
        "n_warmup_steps": 0,
        "interval_steps": 1,
    },
    "halving": {"min_resource": 1, "reduction_factor": 4, "min_early_stopping_rate": 0},
    "hyperband": {"min_resource": 1, "max_resource": "auto", "reduction_factor": 3},
    "threshold": {"lower": None, "upper": None, "n_warmup_steps": 0},
}
"""Options of `hydra/sweeper/sampler` and `hydra/sweeper/pruner`, with the arguments of Optuna's
classes."""


@dataclass
class PoolOptunaConf:
    """`hydra.sweeper`."""

    defaults: list[Any] = field(default_factory=lambda: [{"sampler": "tpe"}, {"pruner": "none"}])
    _target_: str = "hydra_plugins.ddp_train_pool.optuna_sweeper.PoolOptunaSweeper"
    sampler: Any = MISSING
    pruner: Any = MISSING
    direction: str = "minimize"
    """minimize or maximize."""
    n_trials: int = 20
    """Trials of the whole study, those of earlier starts included."""
    n_jobs: int | None = None
    """The most at a time; None: as many as there are devices for."""
    storage: str | None = None
    """A file for Optuna's journal; None: optuna.log in the directory of the sweep."""
    study_name: str | None = None
    params: dict[str, Any] | None = field(default_factory=dict)
    """Keys that are drawn, as on the command line: `x: interval(0, 1)`."""


_store = ConfigStore.instance()
_store.store(
    group="hydra/sweeper", name="pool_optuna", node=PoolOptunaConf, provider="ddp_train_pool"
)
for _name, _arguments in SAMPLERS.items():
    _node = {"name": _name, "seed": None, **_arguments}
    _store.store(group="hydra/sweeper/sampler", name=_name, node=_node, provider="ddp_train_pool")
for _name, _arguments in PRUNERS.items():
    _node = {"name": _name, **_arguments}
    _store.store(group="hydra/sweeper/pruner", name=_name, node=_node, provider="ddp_train_pool")


class PoolOptunaSweeper(Sweeper):
    """Asks Optuna for one job at a time, and reports the result of each.

    A pruner gets the values that the application's `SweepListener` reports.
    """

    def __init__(self, **settings: Any) -> None:
        """settings: the fields of `PoolOptunaConf`."""
        self.settings = PoolOptunaConf(**settings)

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context = hydra_context
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def checked(self, arguments: list[str], parser: OverridesParser) -> list[Override]:
        """All overrides, those of `params` included. Nothing is written and nothing runs.

        Raises PoolError for what Optuna cannot do.
        """
        try:
            from hydra_plugins.ddp_train_pool._study import try_out
        except ImportError as error:
            raise PoolError(f"hydra/sweeper=pool_optuna: {error}; run pip install optuna") from None
        settings = self.settings
        if settings.direction not in ("minimize", "maximize"):
            raise PoolError(
                f"hydra.sweeper.direction={settings.direction}: must be minimize or maximize"
            )
        for name, value in (("n_trials", settings.n_trials), ("n_jobs", settings.n_jobs)):
            if value is not None and value < 1:
                raise PoolError(f"hydra.sweeper.{name}={value}: must be at least 1")
        storage = settings.storage
        if storage and ("://" in storage or Path(storage).expanduser().is_dir()):
            raise PoolError(
                f"hydra.sweeper.storage={storage}: must be the path of a file, in which Optuna"
                " keeps its journal"
            )
        settings.sampler = _option("sampler", settings.sampler)
        settings.pruner = _option("pruner", settings.pruner)
        params = [f"{key}={value}" for key, value in _flat(_option("params", settings.params))]
        overrides = parser.parse_overrides([*params, *arguments])
        try_out(overrides, settings.sampler, settings.pruner)
        return overrides

    def sweep(self, arguments: list[str]) -> None:
        if not isinstance(self.launcher, PoolLauncher):
            raise PoolError(
                "hydra/sweeper=pool_optuna: needs hydra/launcher=pool, which tells when each job"
                " ends; add hydra/launcher=pool"
            )
        with self.launcher.reporting_problems():
            self._sweep(arguments, self.launcher)

    def _sweep(self, arguments: list[str], launcher: PoolLauncher) -> None:
        assert self.hydra_context is not None and self.config is not None  # since `setup`
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = self.checked(arguments, parser)
        from hydra_plugins.ddp_train_pool._study import StudyJobs, open_study

        settings = self.settings
        folder = Path(str(self.config.hydra.sweep.dir))
        folder.mkdir(parents=True, exist_ok=True)
        path = Path(settings.storage).expanduser() if settings.storage else folder / JOURNAL
        study = open_study(
            path, settings.study_name or "sweep", settings.direction, settings.pruner
        )
        jobs = StudyJobs(
            study, overrides, settings.sampler, settings.n_trials, settings.n_jobs, launcher
        )
        OmegaConf.save(self.config, folder / "multirun.yaml")
        try:
            launcher.launch_from(jobs, settings.n_trials)
        finally:
            best = jobs.best()
            if best:
                result = {"name": "optuna", "best_params": best.params, "best_value": best.value}
                OmegaConf.save(OmegaConf.create(result), folder / RESULT)


def _option(kind: str, node: Any) -> dict[str, Any]:
    """The content of `hydra.sweeper.KIND`. Raises PoolError."""
    if isinstance(node, str):
        raise PoolError(
            f"hydra.sweeper.{kind}={node}: is an option of a group; use hydra/sweeper/{kind}={node}"
        )
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node, resolve=True)
    return dict(node or {})


def _flat(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values: `{a: {b: 1}}` and `{a.b: 1}` are the same."""
    for key, value in params.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value
