"""The command that checks another one."""

from __future__ import annotations

import pytest

from ddp_train.commands.check import check
from ddp_train.errors import ConfigError
from tests.support.commands import PROGRAM


@pytest.mark.parametrize("mode", ["study", "prove"])
def test_modes_with_runs_of_their_own_check_them_themselves(mode: str) -> None:
    with pytest.raises(ConfigError, match=f"leave out `check`, since mode={mode} checks all"):
        check(PROGRAM, [f"mode={mode}", "study=strategies"])
