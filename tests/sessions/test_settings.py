"""Words of a session: messages of a run without the keys of a config."""

from ddp_train.sessions.settings import in_words


def test_keys_become_arguments_and_scripts_keep_their_names() -> None:
    assert in_words("train.max_restarts=1: too few") == "max_restarts=1: too few"
    for script in ("train.py:13", "launch.py:7"):
        assert in_words(f"{script}: run.resume") == f"{script}: run.resume"


def test_weights_that_differ_have_a_remedy_of_sessions() -> None:
    remedy = in_words("a hook, or a model that is made differently with strategy.init_sync=false")
    assert "strategy" not in remedy
    assert "run.sum(g) / run.processes" in remedy
