"""The modules of the core that tools outside of it may import, and what each is for.

The laboratory (`ddp_lab`) imports these and no others, and no name of them that begins with an
underscore; tests/house/test_architecture.py holds that. A module that is not here may change
without a word. A change of a name that is used from outside needs a look at the laboratory.

What programs of users need is in `ddp_train` itself: `ddp_train.__all__`.
"""

from __future__ import annotations

MODULES = {
    # the ground
    "ddp_train.errors": "errors that a user sees, each with an exit code and a remedy",
    "ddp_train.hardware": "GPUs, cores and versions of this host",
    "ddp_train.linux": "processes that end with their parent",
    "ddp_train.tensor_tree": "tensors in dicts, lists and objects",
    "ddp_train.testing": "mode=prove as an assertion, which the pytest fixture offers",
    "ddp_train.text": "counts, first lines and proposals in messages",
    # processes
    "ddp_train.distributed.agent": "what torchrun says, and what it is told",
    "ddp_train.distributed.child_environments": "variables that processes are started with",
    "ddp_train.distributed.environment": "variables of this process",
    "ddp_train.distributed.preflight": "what hosts compare before they train together",
    "ddp_train.distributed.process_group": "store, process group and exchanges",
    "ddp_train.distributed.training_step": "what collectives in a loss ask of the current step",
    "ddp_train.distributed.world": "who a process is among the others",
    "ddp_train.launcher.fork_server": "workers that start in milliseconds",
    "ddp_train.launcher.local": "starts a run on this host and returns its exit code",
    "ddp_train.launcher.network_location": "addresses of this host",
    "ddp_train.launcher.stop_requests": "Ctrl-C and SIGTERM, as a value",
    # the config
    "ddp_train.config.auto": "what `auto` means on this hardware",
    "ddp_train.config.bind": "a tree of values as a dataclass, with all problems",
    "ddp_train.config.composition": "overrides and presets as a config",
    "ddp_train.config.freeze": "the config in the run directory, and back",
    "ddp_train.config.metrics": "metrics that keys name",
    "ddp_train.config.overrides": "overrides of a command line, checked",
    "ddp_train.config.prepare": "all that happens before a process starts",
    "ddp_train.config.program": "how this program was started, and its presets",
    "ddp_train.config.run_directory": "whether the run directory may be written",
    "ddp_train.config.validate": "rules of keys and sections",
    "ddp_train.config.yaml_files": "YAML files, read as a command line reads values",
    "ddp_train.options.key": "declares a key, its rule and its meaning",
    "ddp_train.options.registry": "an option of a group with its defaults",
    "ddp_train.options.schema": "the whole config",
    # one job
    "ddp_train.assembly.batches": "how batches of a config come to the device",
    "ddp_train.assembly.data_sets": "opens the data sets of a config",
    "ddp_train.assembly.initial_weights": "gives a model the weights that the config names",
    "ddp_train.assembly.job": "builds all that the loop needs",
    "ddp_train.assembly.model": "builds the model with its task, and tries it once",
    "ddp_train.assembly.strategy": "builds the strategy of a config",
    "ddp_train.data.batch": "a batch on the device",
    "ddp_train.data.batch_plan": "which rank computes which samples",
    "ddp_train.data.datasets": "what a data set is, and its digest",
    "ddp_train.data.loader": "batches of given samples",
    "ddp_train.data.rng": "generators by purpose, process and step",
    "ddp_train.data.sample_tensors": "a sample of a user's data set as tensors",
    "ddp_train.data.sample_transforms": "applies a user's transform to a sample",
    "ddp_train.data.splits": "training, validation and test data",
    "ddp_train.data.user_dataset": "a data set of the user's own",
    "ddp_train.engine.hook_context": "what hooks are given",
    "ddp_train.models.put_back": "passes that leave a model and a task as they were",
    "ddp_train.models.python_state": "what code keeps outside of parameters and buffers",
    "ddp_train.optim.stepper": "what may watch each step",
    "ddp_train.parallel.strategy": "the strategy of a single process",
    "ddp_train.performance.bias_lint": "biases that a norm layer subtracts again",
    "ddp_train.performance.switches": "flags of torch for this process",
    "ddp_train.tasks.mean_loss": "a loss, averaged over batches",
    "ddp_train.tasks.task": "a model with its task",
    # what a run leaves
    "ddp_train.checkpoints.layout": "where checkpoints of a run are",
    "ddp_train.resilience.failure": "which errors only mean that another process is gone",
    "ddp_train.resilience.failure_report": "names of the files that say how a run ended",
    "ddp_train.resilience.heartbeat": "the status board of a rank",
    "ddp_train.resilience.preemption": "the exit code of a run that was stopped and not saved",
    "ddp_train.resilience.run_lock": "one writer in a run directory",
    "ddp_train.resilience.whole_files": "files that are never half written",
    "ddp_train.telemetry.score_lines": "words for scores, and which metrics are the user's",
    "ddp_train.telemetry.pages.charts": "bars and curves of a page",
    "ddp_train.telemetry.pages.page": "writes a page",
    "ddp_train.telemetry.pages.report": "what a page says, in the terminal too",
    "ddp_train.telemetry.pages.run_files": "what a run directory holds, whatever is missing",
    "ddp_train.telemetry.pages.tables": "tables of a page",
}
"""The purpose of each public module, by its name."""
