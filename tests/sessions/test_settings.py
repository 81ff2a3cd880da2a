"""Words of a session: messages of a run without the keys of a config."""

import pytest
import torch

from ddp_train.distributed.replicas import check_norms
from ddp_train.errors import ModelError
from ddp_train.launcher.decide import End, sentences
from ddp_train.sessions.settings import in_words


def test_keys_become_arguments_and_scripts_keep_their_names() -> None:
    assert in_words("train.max_restarts=1: too few") == "max_restarts=1: too few"
    for script in ("train.py:13", "launch.py:7"):
        assert in_words(f"{script}: run.resume") == f"{script}: run.resume"


def test_weights_that_differ_have_a_remedy_of_sessions() -> None:
    with pytest.raises(ModelError) as raised:
        check_norms(["weight"], torch.tensor([[1.0], [2.0]]))
    remedy = in_words(raised.value.remedy)
    assert "strategy" not in remedy
    assert "run.sum(g) / run.processes" in remedy


def test_a_session_is_resumed_by_the_same_command() -> None:
    (saved,) = sentences(End(1), 7, 0, "run_dir=runs/a")
    assert in_words(saved).endswith("; the same command resumes from it")
    (lost,) = sentences(End(1), None, 0, "run_dir=runs/a", finite_step=5)
    assert "after the remedy, the same command resumes from step 5" in in_words(lost)
