"""torch's DDP, with an error that names the parameters without a gradient."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from ddp_train.errors import ModelError
from ddp_train.text import counted


class NamingDdp(nn.parallel.DistributedDataParallel):
    """torch's, which names parameters by their numbers."""

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Raises ModelError if parameters had no gradient in the last step."""
        try:
            return super().forward(*inputs, **keywords)
        except RuntimeError as error:
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if not found:
                raise
            trained = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
            names = [trained[int(number)].removeprefix("model.") for number in found[1].split()]
            some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise ModelError(
                f"the loss does not depend on {counted(len(names), 'parameter')}: {some}",
                "use them in forward, remove or freeze them, or add strategy.find_unused_parameters=true",
            ) from error
