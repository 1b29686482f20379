"""`import echelon` costs hardly more than `import torch`, and a fit imports of Echelon what it comes to use."""

import json
import subprocess
import sys

import pytest

HEAVY = (
    "lightning",
    "matplotlib",
    "omegaconf",
    "pandas",
    "sklearn",
    "tensorboard",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.utils.flop_counter",
    "torch.utils.tensorboard",
    "torchvision",
    "tqdm",
    "yaml",
)
PROBE = """
import json, sys
import torch
before = set(sys.modules)
{statement}
print(json.dumps(sorted(set(sys.modules) - before)))
"""

# Rooms of which a plain fit on one process imports nothing: they are for several processes, searches, plans, streams
# and commands.
UNUSED = (
    *("callbacks.goodput", "callbacks.samples"),
    *("lightning", "trainer.cli", "trainer.engine", "trainer.streams", "trainer.verify"),
    *("strategies.context_parallel", "strategies.doctor", "strategies.estimate", "strategies.experts"),
    *("strategies.logits", "strategies.parallel", "strategies.pipeline", "strategies.resilience"),
    *("strategies.servers", "strategies.snapshots", "strategies.tensor_parallel", "strategies.units"),
)
# The most modules of Echelon after `echelon.Trainer`, and after such a fit. What needs more says what every run uses.
MOST = {"echelon.Trainer": 295, "plain": 300}
FIT = """
import json, sys
import torch
import echelon

class Line(echelon.TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_fit_end(self):
        if self.trainer.global_rank == 0 and self.trainer.world_size > 1:
            print(json.dumps(sorted(sys.modules)))

if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    loader = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)
    validation = loader if settings else None
    echelon.Trainer(max_epochs=1, accelerator="cpu", **settings).fit(Line(), loader, validation)
    if not settings:
        print(json.dumps(sorted(sys.modules)))
"""
FORK_SERVER = "import echelon.strategies.launch.forkserver_preload, json, sys; print(json.dumps(sorted(sys.modules)))"


def last_line_of(program, folder, *arguments):
    """Return what a program prints last."""
    command = [sys.executable, *program, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=True)
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("[")))


def imported_by(statement, folder):
    return last_line_of(["-c", PROBE.format(statement=statement)], folder)


def of_fit(folder, **settings):
    """Return the names of Echelon's modules after a fit, in a worker if the fit starts processes."""
    program = folder / "program.py"
    program.write_text(FIT)
    return ours(last_line_of([program], folder, json.dumps(settings)))


def ours(names):
    return {name.removeprefix("echelon.") for name in names if name.startswith("echelon.")}


@pytest.fixture(scope="module")
def with_trainer(tmp_path_factory):
    """Return what comes with the names of every program."""
    return imported_by("import echelon; echelon.Trainer, echelon.TrainModule", tmp_path_factory.mktemp("trainer"))


def test_nothing_heavy_comes_with_echelon(with_trainer):
    assert [name for name in HEAVY if name in with_trainer] == []


def test_the_probe_sees_what_comes(tmp_path):
    assert {"omegaconf", "yaml"} <= {*imported_by("import omegaconf, yaml", tmp_path)}


def test_the_trainer_imports_few_modules(with_trainer):
    assert len(ours(with_trainer)) <= MOST["echelon.Trainer"]


def test_a_plain_fit_imports_what_it_uses(tmp_path):
    names = of_fit(tmp_path)
    unused = {room: sorted(name for name in names if f"{name}.".startswith(f"{room}.")) for room in UNUSED}
    assert {room: found for room, found in unused.items() if found} == {}
    assert len(names) <= MOST["plain"], sorted(names)


def test_a_rank_imports_nothing_that_its_fork_server_has_not_imported(tmp_path):
    in_rank = of_fit(tmp_path, strategy="ddp", devices=2, logger=False)
    assert "trainer.loop.train" in in_rank
    assert in_rank - ours(last_line_of(["-c", FORK_SERVER], tmp_path)) == set()
