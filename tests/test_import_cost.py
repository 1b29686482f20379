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

def tell(names):
    print(json.dumps(sorted(names)), flush=True)

before = set(sys.modules)
import echelon
echelon.Trainer, echelon.TrainModule
if __name__ == "__main__":
    tell(set(sys.modules) - before)

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
            tell(sys.modules)

if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    loader = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)
    validation = loader if settings else None
    echelon.Trainer(max_epochs=1, accelerator="cpu", **settings).fit(Line(), loader, validation)
    if not settings:
        tell(sys.modules)
        before = set(sys.modules)
        import omegaconf
        tell(set(sys.modules) - before)
"""
FORK_SERVER = "import echelon.strategies.launch.forkserver_preload, json, sys; print(json.dumps(sorted(sys.modules)))"


def told_by(program, folder, *arguments):
    """Return the lists that a program prints."""
    command = [sys.executable, *program, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def told_by_fit(folder, **settings):
    """Return the modules that came with Echelon, and those after a fit, in a worker if the fit starts processes."""
    program = folder / "program.py"
    program.write_text(FIT)
    return told_by([program], folder, json.dumps(settings))


def ours(names):
    return {name.removeprefix("echelon.") for name in names if name.startswith("echelon.")}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return what comes with the names of every program, what is there after a fit, and what an import brings."""
    return told_by_fit(tmp_path_factory.mktemp("plain"))


def test_nothing_heavy_comes_with_echelon(plain):
    assert [name for name in HEAVY if name in plain[0]] == []


def test_the_probe_sees_what_comes(plain):
    assert "omegaconf" in plain[2]


def test_the_trainer_imports_few_modules(plain):
    assert len(ours(plain[0])) <= MOST["echelon.Trainer"]


def test_a_plain_fit_imports_what_it_uses(plain):
    names = ours(plain[1])
    unused = {room: sorted(name for name in names if f"{name}.".startswith(f"{room}.")) for room in UNUSED}
    assert {room: found for room, found in unused.items() if found} == {}
    assert len(names) <= MOST["plain"], sorted(names)


def test_a_rank_imports_nothing_that_its_fork_server_has_not_imported(tmp_path):
    in_rank = ours(told_by_fit(tmp_path, strategy="ddp", devices=2, logger=False)[-1])
    assert "trainer.loop.train" in in_rank
    assert in_rank - ours(told_by(["-c", FORK_SERVER], tmp_path)[0]) == set()
