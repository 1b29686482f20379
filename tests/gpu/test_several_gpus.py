"""What takes two or more GPUs to test: NCCL between ranks, devices other than the first, and dp."""

import pytest
import torch
from on_gpu import fitted, weights_of

import echelon
from echelon import Callback
from echelon.trainer.checkpoint import load

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu]


@pytest.mark.parametrize("strategy", ["ddp", "zero", "fsdp", "hsdp", "dp", "local_sgd"])
def test_several_gpus_come_near_to_one(strategy):
    one = weights_of(fitted(global_batch_size=16))
    several = weights_of(fitted(strategy=strategy, devices=2, global_batch_size=16))
    assert torch.isfinite(several).all()
    # ranks of local_sgd average their weights every few steps only
    assert (one - several).norm() < (0.1 if strategy == "local_sgd" else 0.01) * one.norm()


def test_a_checkpoint_of_a_device_that_is_not_the_first_is_whole(tmp_path):
    module = fitted(devices=[1], callbacks=[echelon.ModelCheckpoint(tmp_path, every_n_train_steps=5)],
                    enable_checkpointing=True)  # fmt: skip
    saved = load(max(tmp_path.glob("*.ckpt"), key=lambda path: path.stat().st_mtime))["model"]
    assert torch.equal(torch.cat([saved[name].flatten() for name, _ in module.named_parameters()]), weights_of(module))


class Exchange(Callback):
    def on_fit_start(self, trainer, module):
        """Both ranks send 64 MB before they receive."""
        strategy = trainer.strategy
        other = 1 - strategy.rank
        sending = strategy.isend(torch.full((1 << 24,), float(strategy.rank), device=strategy.device), other)
        received = strategy.recv(other)
        sending.wait()
        assert received.device == strategy.device
        assert bool((received == other).all())
        assert [int(tensor[0]) for tensor in strategy.gather(received[:1]) or []] == (
            [1, 0] if not strategy.rank else []
        )


def test_ranks_exchange_tensors_that_are_larger_than_the_buffers_of_nccl():
    fitted(strategy="ddp", devices=2, max_steps=1, callbacks=[Exchange()])


class OtherMasks(Callback):
    def on_train_start(self, trainer, module):
        drawn = trainer.strategy.all_gather(torch.rand(8, device=trainer.strategy.device))
        assert not torch.equal(drawn[0], drawn[1])


def test_ranks_draw_other_numbers_on_their_devices():
    fitted(strategy="ddp", devices=2, max_steps=1, callbacks=[OtherMasks()])


def test_an_elastic_run_on_two_gpus_survives_a_kill():
    runs = [
        fitted(strategy=echelon.ElasticStrategy("fsdp", snapshot_every=5, chaos=chaos), devices=2, max_steps=20)
        for chaos in (None, "kill:rank=1@step=12")
    ]
    assert torch.equal(*map(weights_of, runs))
