"""FSDP on a process group of one rank, which is all the NCCL that one GPU can run, each in a process of its own."""

import pytest
from on_gpu import run_program

pytestmark = pytest.mark.gpu

PROGRAM = """
import os, socket
from contextlib import closing
import torch

from echelon.strategies.distributed.process_group import ProcessGroup

class OneRank(echelon.FSDPStrategy):
    def connect(self, hardware, precision):
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            port = free.getsockname()[1]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        if self.group is None:
            device = hardware.device(0)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            self.group = ProcessGroup(self.environment, device)
            self.group.join()
        super().connect(hardware, precision)

strategy = OneRank({options})
trainer = on_gpu.quiet_on_gpu(strategy=strategy, gradient_clip_val=1.0, max_steps=6, {settings})
module = on_gpu.Net(dropout=0.1, counts={counts}, outputs={outputs})
trainer.fit(module, on_gpu.loader())
assert torch.isfinite(on_gpu.weights_of(module)).all()
layers = strategy._sharded._layers
print("finished", trainer.global_step, None if layers is None else layers._active)
"""


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ("", ""),
        ("", "precision='bf16-mixed'"),
        ("", "precision='16-mixed'"),
        ("cpu_offload=True", ""),
        ("cpu_offload=True", "precision='16-mixed'"),
        ("", "precision='bf16-mixed', activation_checkpointing='selective'"),
        ("", "precision='bf16-mixed', activation_checkpointing=echelon.ActivationCheckpointing(offload=True)"),
        ("", "callbacks=[echelon.LossSpikePolicy(), echelon.NaNGuard()]"),
        ("", "compile={'backend': 'aot_eager'}"),
    ],
)
def test_a_sharded_module_trains(options, settings, counts):
    program = PROGRAM.format(options=options, settings=settings, counts=counts, outputs=8)
    assert "finished 6 None" in run_program(program)


@pytest.mark.parametrize("options", ["", "cpu_offload=True", "reshard_after_forward=False"])
@pytest.mark.parametrize("settings", ["", "precision='bf16-mixed', accumulate_grad_batches=2"])
def test_a_large_head_is_gathered_for_its_calls(options, settings):
    program = PROGRAM.format(options=options, settings=settings, counts=False, outputs=4096)
    assert "finished 6 {'training_step': [True]}" in run_program(program)
