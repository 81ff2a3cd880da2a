"""One process of a session: what it says before it trains."""

import pytest
import torch

from ddp_train.sessions.process import seed_in_vain


@pytest.mark.parametrize(
    ("earlier", "seed", "is_in_vain"),
    [(999, 0, True), (0, 7, True), (7, 7, False), (2**63 + 999, 0, False)],
)
def test_a_seed_before_the_session_is_told(earlier: int, seed: int, is_in_vain: bool) -> None:
    note = seed_in_vain(torch.Generator().manual_seed(earlier).initial_seed(), seed)
    assert (note is not None) is is_in_vain
    if note:
        assert f"session(..., seed={earlier})" in note
