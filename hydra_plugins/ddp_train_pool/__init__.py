"""The jobs of a sweep on all devices of a host at once, in any Hydra application.

`hydra/launcher=pool` and `hydra/sweeper=pool_optuna`: docs/guides/sweeps.md

What an application may import lies here. It imports nothing of ddp_train. Hydra runs this module
and those without an underscore anew at each start, so classes are defined in the others: there is
one of each, whoever imports it.
"""

from hydra_plugins.ddp_train_pool._devices import Locks, PoolError
from hydra_plugins.ddp_train_pool._jobs import Pruned, SweepEnd
from hydra_plugins.ddp_train_pool._listener import SweepListener, listening

__all__ = ["Locks", "PoolError", "Pruned", "SweepEnd", "SweepListener", "listening"]
