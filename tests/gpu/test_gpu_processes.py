"""Launched workers on one GPU: their seeds and settings, a fork server that stays usable, and kills."""

import pytest
import torch
from on_gpu import fitted, run_program, weights_of

import echelon

pytestmark = pytest.mark.gpu


def test_launched_runs_draw_the_numbers_of_a_run_in_this_process():
    strategies = ["single", echelon.ElasticStrategy("ddp"), echelon.ElasticStrategy("ddp")]
    first, *others = (weights_of(fitted(dropout=0.5, strategy=strategy)) for strategy in strategies)
    for other in others:
        assert torch.equal(first, other)


LAUNCHED = """
if __name__ == "__main__":
    strategy = echelon.ElasticStrategy("ddp", max_restarts=0)
    on_gpu.fitted(strategy=strategy, max_steps=2)
    print("finished")
"""


def test_a_module_that_asks_for_devices_when_it_is_imported_does_not_stop_workers(tmp_path):
    text = "from torch.utils.cpp_extension import load\n" + LAUNCHED
    assert "finished" in run_program(text, str(tmp_path / "program.py"))


def test_tf32_that_is_set_by_backend_travels(tmp_path):
    text = "import torch\ntorch.backends.cuda.matmul.fp32_precision = 'tf32'\n" + LAUNCHED
    assert "finished" in run_program(text, str(tmp_path / "program.py"))


def test_a_worker_with_a_context_that_is_killed_leaves_no_trace_in_the_weights():
    plain, killed = (
        weights_of(fitted(strategy=echelon.ElasticStrategy("ddp", snapshot_every=5, chaos=chaos), max_steps=30))
        for chaos in (None, "kill:rank=0@step=12")
    )
    assert torch.equal(plain, killed)


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("DDPStrategy", "32-true"),
        ("DDPStrategy", "16-mixed"),
        ("FSDPStrategy", "bf16-mixed"),
        ("FSDPStrategy", "16-mixed"),
    ],
)
def test_two_ranks_share_one_gpu_by_gloo(tmp_path, strategy, precision):
    """NCCL refuses two ranks on one GPU; what DDP and FSDP do on the device is real."""
    text = f"""
if __name__ == "__main__":
    echelon.seed_everything(1)
    trainer = on_gpu.quiet_on_gpu(strategy=echelon.{strategy}(process_group_backend="gloo"), devices="auto",
                                  precision={precision!r}, gradient_clip_val=1.0)
    trainer.fit(on_gpu.Net(dropout=0.1, counts=True), on_gpu.loader())
    if trainer.is_global_zero:
        print("finished", trainer.global_step)
"""
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "program.py"))
    assert "finished 20" in run_program(text, *launcher)
