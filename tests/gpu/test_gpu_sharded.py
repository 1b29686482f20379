"""FSDP on a process group of one rank, which is all the NCCL that one GPU can run, in a process of its own."""

import json

import pytest
from on_gpu import run_program

pytestmark = pytest.mark.gpu

PROGRAM = """
import json, os, socket, traceback
from contextlib import closing
import torch

from echelon.strategies.distributed.process_group import ProcessGroup
from echelon.strategies.distributed.ranks import Ranks
from echelon.strategies.parallel.mesh import make_mesh

class OneRank(echelon.FSDPStrategy):
    def connect(self, hardware, precision):
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            port = free.getsockname()[1]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        super().connect(hardware, precision)
        group = ProcessGroup(self.ranks.environment, self.device)
        group.join()
        self.ranks = Ranks.of(self.ranks.environment, group, self.device)
        self._mesh = make_mesh(self.device.type, self.degrees, axes=self._axes)

def train(strategy, counts, outputs, **settings):
    trainer = on_gpu.quiet_on_gpu(strategy=strategy, gradient_clip_val=1.0, max_steps=6, **settings)
    module = on_gpu.Net(dropout=0.1, counts=counts, outputs=outputs)
    before = on_gpu.weights_of(module)
    trainer.fit(module, on_gpu.loader())
    after = on_gpu.weights_of(module)
    assert torch.isfinite(after).all()
    assert 1e-4 < (after - before).abs().max() < 2e-2, "6 steps of 1e-3 change a weight by so much"
    layers = strategy.placed._sharded.runs.layers
    return f"finished {trainer.global_step} {None if layers is None else layers._active}"

def attempt(train):
    try:
        return train()
    except Exception:
        return traceback.format_exc()[-3000:]
"""
SMALL = [
    ("", ""),
    ("", "precision='bf16-mixed'"),
    ("", "precision='16-mixed'"),
    ("cpu_offload=True", ""),
    ("cpu_offload=True", "precision='16-mixed'"),
    ("", "precision='bf16-mixed', activation_checkpointing='selective'"),
    ("", "precision='bf16-mixed', activation_checkpointing=echelon.ActivationCheckpointing(offload=True)"),
    ("", "callbacks=[echelon.LossSpikePolicy(), echelon.NaNGuard()]"),
    ("", "compile={'backend': 'aot_eager'}"),
]
LARGE = [
    (options, settings)
    for options in ("", "cpu_offload=True", "reshard_after_forward=False")
    for settings in ("", "precision='bf16-mixed', accumulate_grad_batches=2")
]


@pytest.fixture(scope="module")
def outcomes():
    """Train by each case in one process, which takes some seconds to start, and return how each ended."""
    cases = [(*case, counts, 8) for case in SMALL for counts in (False, True)]
    cases += [(*case, False, 4096) for case in LARGE]
    lines = [
        f"print(json.dumps(attempt(lambda: train(OneRank({options}), {counts}, {outputs}, {settings}))), flush=True)"
        for options, settings, counts, outputs in cases
    ]
    printed = run_program("\n".join([PROGRAM, *lines]), timeout=600)
    answers = [json.loads(line) for line in printed.splitlines() if line.startswith('"')]
    return dict(zip(cases, answers, strict=True))


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize(("options", "settings"), SMALL)
def test_a_sharded_module_trains(outcomes, options, settings, counts):
    assert outcomes[options, settings, counts, 8] == "finished 6 None"


@pytest.mark.parametrize(("options", "settings"), LARGE)
def test_a_large_head_is_gathered_for_its_calls(outcomes, options, settings):
    assert outcomes[options, settings, False, 4096] == "finished 6 {'training_step': [True]}"
