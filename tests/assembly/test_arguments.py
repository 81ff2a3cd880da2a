"""Arguments of code that a config names."""

from __future__ import annotations

import torch
from torch.optim import lr_scheduler

from ddp_train.assembly.arguments import needs_argument

WEIGHTS = [torch.zeros(1)]


def test_steps_that_need_an_argument_are_found() -> None:
    sgd = torch.optim.SGD(WEIGHTS, lr=0.1)
    assert not needs_argument(sgd.step)
    assert needs_argument(torch.optim.LBFGS(WEIGHTS).step)
    assert needs_argument(lr_scheduler.ReduceLROnPlateau(sgd).step)
    assert not needs_argument(lr_scheduler.StepLR(sgd, 1).step)
