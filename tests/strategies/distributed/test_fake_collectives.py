"""Collectives of a rehearsal, whose other ranks do not exist."""

import pytest
import torch
from torch import nn

from echelon import DDPStrategy
from echelon.common.errors import ConfigError
from echelon.strategies import Precision
from echelon.strategies.cluster.hardware import Hardware
from echelon.strategies.cluster.launchers import detect_environment
from echelon.trainer.planning.rehearsal import as_rank


@pytest.fixture
def ranks():
    """The ranks of the second of three processes, without the others."""
    with as_rank(1, 3, 3):
        strategy = DDPStrategy()
        precision = Precision()
        hardware = Hardware("cpu", (0, 1, 2), environment=detect_environment())
        strategy.validate(hardware, precision)
        strategy.connect(hardware, precision)
        yield strategy.ranks.all


def test_a_ring_of_transfers_ends_with_what_this_rank_has_sent(ranks):
    assert ranks.is_fake
    parts = [torch.ones(2), {"mean": torch.zeros(3)}]
    sending = ranks.isend(parts, 2)
    received = ranks.irecv(0).wait()
    assert sending.wait() is None
    assert received is parts


def test_a_peer_answers_what_it_was_sent_before_what_others_were(ranks):
    assert ranks.recv(0) is None
    ranks.send("first", 0)
    ranks.send("second", 2)
    assert [ranks.recv(0), ranks.recv(2), ranks.irecv(0).wait()] == ["first", "second", "first"]


def test_a_rank_that_the_run_would_not_have_is_refused(ranks):
    with pytest.raises(ConfigError, match="dst=3 must be a rank from 0 to 2"):
        ranks.isend(nn.Linear(1, 1).weight, 3)
    with pytest.raises(ConfigError, match="src=-1 must be a rank"):
        ranks.irecv(-1)
