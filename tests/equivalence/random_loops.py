"""Hand-written loops drawn at random: each ends under an Engine in each layout as in one process.

Usage: python tests/equivalence/random_loops.py [--first SEED] [--number LOOPS] [layout ...]
"""

import random
import sys
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from as_rank import attempt
from random_data import ORDERS, WHOLE, data, train_loader
from random_modules import OPTIMIZERS
from random_programs import ACCELERATOR, LAYOUTS, End, copied, data_ranks_of
from random_runs import compare, main
from residual import PLAN, Block

from echelon import Engine, Loss
from echelon.strategies.state.dtensor import gather_whole

ENGINES = [title for title in LAYOUTS if title.split()[0] not in ("dp", "pp", "ps", "single")]
"""The layouts of an Engine; those of `dp`, pipelines and servers have loops of their own."""


@dataclass(frozen=True)
class Loop:
    """A loop as a function of its seed; the fields of its data are those of a program of a Trainer."""

    seed: int
    batch: int
    global_batch: int
    samples: int
    order: str
    drop_last: bool
    num_workers: int
    whole: str | None
    optimizer: str
    clip: dict
    units: bool
    epochs: int
    stop: int
    """The step after which a checkpoint is saved, from which another run goes on."""
    schedule: str
    freezes: bool
    """Whether the embedding is not trained in the second epoch."""
    has_critic: bool
    """Whether a second module, with its own optimizer, learns from what the first one gives."""
    val_samples: int
    overlaps: bool
    by_closure: bool
    skips: bool
    """Whether no update is made in each third step."""
    is_manual: bool = False
    combined: None = None

    @classmethod
    def drawn(cls, seed):
        """Return the loop of a seed."""
        draw = random.Random(seed)
        batch = draw.choice((1, 2, 3))
        whole = draw.choice((None, None, "batch sampler", "stream", "list"))
        size = batch * draw.choice((2, 4, 8)) + draw.choice((0, 0, 1)) if whole is None else WHOLE * batch
        return cls(
            seed=seed,
            batch=batch,
            global_batch=size,
            samples=draw.randint(size, 4 * size),
            order=draw.choice(list(ORDERS)),
            drop_last=draw.random() < 0.2,
            num_workers=int(draw.random() < 0.1),
            whole=whole,
            optimizer=draw.choice([name for name in OPTIMIZERS if name != "lbfgs"]),
            clip=draw.choice(({}, {"max_norm": 0.05}, {"clip_val": 0.01})),
            units=draw.random() < 0.3,
            epochs=draw.randint(1, 3),
            stop=draw.randint(1, 6),
            schedule=draw.choice(("none", "by step", "by epoch")),
            freezes=draw.random() < 0.2,
            has_critic=draw.random() < 0.25,
            val_samples=draw.randint(1, 9),
            overlaps=draw.random() < 0.8,
            by_closure=draw.random() < 0.15,
            skips=draw.random() < 0.15,
        )

    def is_left_out(self, layout):
        """Return False: each layout of an Engine trains each loop."""
        return False


class Net(nn.Module):
    """A regression on sequences of 4, without a training step."""

    tp_plan = PLAN

    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(3, 4), nn.ModuleList(Block() for _ in range(2)), nn.Linear(4, 1)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Run:
    """A loop that runs under an Engine."""

    def __init__(self, loop, layout, folder, checkpoint):
        self.loop, self.folder, where = loop, folder, LAYOUTS[layout]
        torch.manual_seed(loop.seed)
        self.engine = engine = Engine(
            strategy=where.make(),
            devices=where.devices,
            accelerator="cpu" if layout == "single" else ACCELERATOR,
            precision="64-true",
        )
        cut = {"global_batch_size": loop.global_batch}
        if loop.whole is not None:
            cut = {"accumulate_grad_batches": WHOLE // data_ranks_of(layout)}
        settings = {} if loop.overlaps else {"overlap": False}
        net = Net()
        self.net, self.optimizer = engine.setup(net, OPTIMIZERS[loop.optimizer](net.parameters()), **settings)
        self.schedule = lr_scheduler.ExponentialLR(self.optimizer, 0.8) if loop.schedule != "none" else None
        self.critic = self.critics_optimizer = None
        if loop.has_critic:
            critic = nn.Linear(1, 1)
            self.critic, self.critics_optimizer = engine.setup(critic, torch.optim.SGD(critic.parameters(), 0.1))
        self.loader = engine.setup_dataloaders(train_loader(loop), **cut)
        self.step = self.epoch = 0
        self.rows, self.rates = [], []
        self.is_resumed = checkpoint is not None
        if checkpoint is not None:
            rest = engine.load(checkpoint, self.state())
            self.step, self.epoch = rest["step"], rest["epoch"]
            if self.schedule is not None:
                self.schedule.load_state_dict(rest["schedule"])

    def state(self):
        """Return what a checkpoint has of the loop's objects."""
        state = {"model": self.net, "optimizer": self.optimizer, "loader": self.loader}
        return state | ({"critic": self.critic, "critics": self.critics_optimizer} if self.critic is not None else {})

    def loss_of(self, batch):
        """Return the loss of a batch."""
        x, y, units = batch
        output = self.net(x)
        errors = (output - y).square().mean((1, 2))
        if self.critic is not None:
            errors = errors + self.critic(output).square().mean((1, 2))
        if self.loop.units:
            return Loss((errors * units).sum(), units.sum()), errors
        return errors.mean(), errors

    def train(self):
        """Train the epochs that are left."""
        loop, engine = self.loop, self.engine
        while self.epoch < loop.epochs:
            if loop.freezes:
                self.net.embed.requires_grad_(self.epoch != 1)
            seen = []
            for batch in self.loader:
                loss, errors = self.loss_of(batch)
                engine.backward(loss)
                seen.append(engine.gather_for_metrics(errors.detach()))
                if engine.sync_gradients:
                    self.update()
                    self.rows.append(((self.step, "loss"), float(torch.cat(seen).mean())))
                    seen = []
            self.epoch += 1
            if self.loop.schedule == "by epoch":
                self.schedule.step()
            self.rows.append(((self.step, "val"), self.evaluate()))

    def update(self):
        """Update the weights, and save a checkpoint if it is its turn."""
        loop = self.loop
        if loop.clip:
            self.engine.clip_gradients(self.optimizer, **loop.clip)
        if not (loop.skips and self.step % 3 == 2):
            self.optimizer.step(*[lambda: None] * loop.by_closure)
        self.optimizer.zero_grad()
        if self.critic is not None:
            self.critics_optimizer.step()
            self.critics_optimizer.zero_grad()
        self.step += 1
        if loop.schedule == "by step":
            self.schedule.step()
        self.rates.append(((self.step, "lr"), self.optimizer.param_groups[0]["lr"]))
        if self.step == loop.stop and not self.is_resumed:
            own = {"step": self.step, "epoch": self.epoch}
            own |= {} if self.schedule is None else {"schedule": self.schedule.state_dict()}
            self.engine.save(self.folder / "stopped.ckpt", self.state() | own)

    def evaluate(self):
        """Return the mean error of samples that ranks share."""
        errors = []
        self.net.eval()
        with torch.no_grad():
            for x, y, _ in self.engine.setup_dataloaders(DataLoader(data(self.loop.val_samples, 2), 2)):
                errors.append(self.engine.gather_for_metrics((self.net(x) - y).square().mean((1, 2))))
        self.net.train()
        together = torch.cat(errors)
        assert len(together) == self.loop.val_samples
        return float(together.mean())


def run(seed, layout, folder, checkpoint=None):
    """Return how a loop ends in a layout; one that goes on from a checkpoint saves none."""
    one = Run(Loop.drawn(seed), layout, folder, checkpoint)
    one.train()
    state = gather_whole(one.net.state_dict(), is_kept=True)
    return End(copied(state), one.rows, one.rates, (one.step, one.epoch))


def run_all(jobs, layout):
    """Return the ends of several loops in this process."""
    warnings.simplefilter("ignore")
    ends = [attempt(run, seed, layout, folder, checkpoint) for seed, folder, checkpoint in jobs]
    return [End(error=end) if isinstance(end, str) else end for end in ends]


compare_loops = partial(compare, kind=Loop, run=run_all)
"""Yields what is not alike of the loops in some layouts, as `compare` does of programs."""


if __name__ == "__main__":
    sys.exit(main(__doc__, ENGINES, Loop, run_all))
