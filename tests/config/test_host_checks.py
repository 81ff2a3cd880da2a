"""What a host lacks is reported before a process starts."""

from __future__ import annotations

from unittest import mock

import pytest

from ddp_train.config import host_checks

pytestmark = pytest.mark.usefixtures("folder_without_gpus")


def test_too_few_open_files_are_told_before_a_process_hangs() -> None:
    with mock.patch("resource.getrlimit", return_value=(24, 4096)):
        (problem,) = host_checks.open_files()
    assert str(problem).startswith("a process may open 24 files (ulimit -n), too few")
    assert not list(host_checks.open_files())
