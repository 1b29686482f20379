"""Programs whose steps leave traces of each sample, on layouts in which some ranks have fewer samples than others."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from as_rank import attempt, step_by_hand_on
from matrix import whole_state
from pairwise import covering
from residual import PLAN, Block
from sweep import IS_SWEEP, dealt
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from echelon import Engine, FSDPStrategy, ParallelStrategy, Strategy, Trainer, TrainModule, seed_everything
from echelon.strategies.state.dtensor import gather_whole

NUMBERS = (7, 9, 10, 12)
"""The numbers of samples, with each rest of a global batch of 4; the values of the samples are 1, 2, ..."""
BATCH = 2
KINDS = ("metric", "list", "module-level list", "dict")
STAGES = ("training", "sanity check", "fit's validation", "validate", "test", "predict")
OWN_LOOPS = [(strategy, processes) for processes in (2, 3) for strategy in ("ddp", "fsdp")]
"""Where programs with an Engine run, and those that draw random numbers."""
NUMBERS_OF_LOOPS = dealt(OWN_LOOPS, NUMBERS, (0,))
"""On how many samples an Engine trains there."""

OF_THE_MODULE: defaultdict[str, list[float]] = defaultdict(list)
"""The module-level lists, one of each stage."""


@dataclass(frozen=True)
class Layout:
    """A strategy on some number of processes, and how it is used."""

    title: str
    processes: int
    make: Callable[[], "str | Strategy"]
    settings: Mapping[str, Any] = field(default_factory=lambda: {"global_batch_size": 4})
    """What makes up a global batch, and other settings of the trainer."""
    global_batch: int = 4
    """Samples per optimizer step, with these settings."""
    is_manual: bool = False
    num_loaders: int = 1
    kind: str = "plain"
    """A key of `MODULES`."""
    is_checked: bool = False
    """Whether the first step of each kind runs twice more to be checked, which is undone in the module only."""

    @property
    def strategy(self) -> str:
        """The strategy and its number of processes, without how they are used."""
        return self.title.partition(", ")[0]

    @property
    def use(self) -> str:
        """How they are used; nothing for the plain way."""
        return self.title.partition(", ")[2]

    @property
    def trainer_settings(self) -> Mapping[str, Any]:
        """The settings of the trainer; manual optimization takes none of the size of a step."""
        return {} if self.is_manual else self.settings


def of(title, processes, make, **options):
    """Return a layout; a global batch of other than 4 samples is that many in the settings as well."""
    if "global_batch" in options:
        options.setdefault("settings", {"global_batch_size": options["global_batch"]})
    return Layout(title, processes, make, **options)


LAYOUTS = [
    of("fsdp 2", 2, lambda: "fsdp"),
    of("fsdp 2, offloaded", 2, lambda: FSDPStrategy(cpu_offload=True)),
    of("fsdp 2, recomputed", 2, lambda: "fsdp", settings={"global_batch_size": 4, "activation_checkpointing": "full"}),
    of("fsdp 2, global batch of 8", 2, lambda: "fsdp", global_batch=8),
    of("fsdp 2, accumulating 3", 2, lambda: "fsdp", global_batch=12, settings={"accumulate_grad_batches": 3}),
    of("fsdp 2, manual", 2, lambda: "fsdp", is_manual=True),
    of("fsdp 2, two loaders", 2, lambda: "fsdp", num_loaders=2),
    of("fsdp 2, frozen batch norm", 2, lambda: "fsdp", kind="normed"),
    of("ddp 2", 2, lambda: "ddp"),
    of("ddp 2, manual", 2, lambda: "ddp", is_manual=True),
    of("zero 2", 2, lambda: "zero"),
    of("zero 2, manual", 2, lambda: "zero", is_manual=True),
    of("fsdp 3", 3, lambda: "fsdp"),
    of("fsdp 3, global batch of 6", 3, lambda: "fsdp", global_batch=6),
    of("fsdp 3, accumulating 2", 3, lambda: "fsdp", global_batch=12, settings={"accumulate_grad_batches": 2}),
    of("fsdp 3, manual", 3, lambda: "fsdp", global_batch=6, is_manual=True),
    of("ddp 3", 3, lambda: "ddp"),
    of("ddp 3, manual", 3, lambda: "ddp", global_batch=6, is_manual=True),
    of("fsdp 4, global batch of 4", 4, lambda: "fsdp"),
    of("fsdp 4", 4, lambda: "fsdp", global_batch=8),
    of("fsdp 4, global batch of 12", 4, lambda: "fsdp", global_batch=12),
    of("hsdp 2 x 2", 4, lambda: FSDPStrategy(replicate=2), global_batch=8),
    of("hsdp 2 x 2, manual", 4, lambda: FSDPStrategy(replicate=2), global_batch=8, is_manual=True),
    of("dp_shard 2 x tp 2", 4, lambda: ParallelStrategy(dp_shard=2, tp=2, tp_plan=PLAN)),
    of("dp_shard 2 x cp 2", 4, lambda: ParallelStrategy(dp_shard=2, cp=2), is_checked=True),
    of("pp 2 x dp_shard 2", 4, lambda: ParallelStrategy(pp=2, dp_shard=2), global_batch=8),
]
FIRST = {layout.strategy: layout for layout in reversed(LAYOUTS)}
"""The first layout of each strategy."""
USES_ELSEWHERE = {
    "fsdp 2": ("global batch of 8",),
    "zero 2": ("manual",),
    "hsdp 2 x 2": ("manual",),
    "fsdp 3": ("global batch of 6", "accumulating 2", "manual"),
    "ddp 3": ("manual",),
    "fsdp 4": ("", "global batch of 12"),
}
"""Ways to use a strategy that another strategy, or the same on fewer ranks, has as well, by strategy."""
CELLS = (
    covering(
        [(layout, number) for layout in LAYOUTS for number in NUMBERS],
        lambda cell: {"strategy": cell[0].strategy, "use": cell[0].use, "number": cell[1]},
    )
    if IS_SWEEP
    else [
        (layout, NUMBERS[:3][place % 3])
        for place, layout in enumerate(LAYOUTS)
        if layout in FIRST.values() or layout.use not in USES_ELSEWHERE.get(layout.strategy, ())
    ]
)
"""In a sweep each strategy, and each way to use one, with each number; else most layouts, each with a rest."""


class Tracing(TrainModule):
    """A regression on sequences whose steps leave the value of each sample in metrics, lists and dicts."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.automatic_optimization = not layout.is_manual
        self.embed, self.blocks, self.head = nn.Linear(3, 4), nn.ModuleList(Block() for _ in range(2)), nn.Linear(4, 1)
        for place in range(len(STAGES)):
            setattr(self, f"metric_{place}", SumMetric())
            setattr(self, f"list_{place}", [])
            setattr(self, f"dict_{place}", {"values": 0.0})
        self.trained, self.tested = SumMetric(), SumMetric()
        self.validated_0, self.validated_1 = SumMetric(), SumMetric()

    def of(self, kind: str, stage: str) -> Any:
        """Return what holds the traces of a stage."""
        return getattr(self, f"{kind}_{STAGES.index(stage)}")

    def trace(self, stage: str, values: torch.Tensor) -> None:
        """Leave the traces of samples."""
        self.of("metric", stage).update(values)
        self.of("list", stage).extend(values.tolist())
        self.of("dict", stage)["values"] += values.sum().item()
        OF_THE_MODULE[stage].extend(values.tolist())

    def errors(self, batch: Any) -> torch.Tensor:
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x)
        return (self.head(x) - batch[1]).square()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trace("training", batch[2])
        self.trained.update(batch[2])
        loss = self.errors(batch).mean()
        self.log("trained", self.trained, on_step=False, on_epoch=True)
        return step_by_hand_on(self, loss)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        stage = "validate"
        if self.trainer.state.fn == "fit":
            stage = "sanity check" if self.trainer.sanity_checking else "fit's validation"
        self.trace(stage, batch[2])
        logged = self.validated_1 if dataloader_idx else self.validated_0
        logged.update(batch[2])
        self.log("val_loss", self.errors(batch).mean())
        self.log("validated", logged)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.trace("test", batch[2])
        self.tested.update(batch[2])
        self.log("test_loss", self.errors(batch).mean())
        self.log("tested", self.tested)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.trace("predict", batch[2])
        return batch[2] + 0 * self.errors(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Normed(Tracing):
    """The same with a batch norm in eval mode, whose statistics are those that it was given."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.norm = nn.BatchNorm1d(4)
        self.norm.running_mean += 0.5

    def on_train_epoch_start(self) -> None:
        self.norm.eval()

    def errors(self, batch: Any) -> torch.Tensor:
        x = self.norm(self.embed(batch[0]).transpose(1, 2)).transpose(1, 2)
        return (self.head(self.blocks[1](self.blocks[0](x))) - batch[1]).square()


MODULES = {"plain": Tracing, "normed": Normed}


def samples(number: int) -> TensorDataset:
    """Return sequences of 4, their targets, and their values from 1 on."""
    x = torch.randn(number, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, torch.sin(x.sum(dim=2, keepdim=True)), torch.arange(1.0, number + 1, dtype=torch.float64))


def program(layout: Layout, number: int) -> dict[str, Any]:
    """Train, evaluate and predict; return the weights, what was logged, and what this rank's steps have left."""
    seed_everything(5, verbose=False)
    OF_THE_MODULE.clear()
    module = MODULES[layout.kind](layout)
    trainer = Trainer(
        strategy=layout.make(),
        accelerator="cpu",
        devices=1 if layout.processes == 1 else "auto",
        precision="64-true",
        max_epochs=1,
        num_sanity_val_steps=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **layout.trainer_settings,
    )
    data = [DataLoader(samples(number), BATCH) for _ in range(layout.num_loaders)]
    trainer.fit(module, data[0], data)
    logged = {"training": [trainer.callback_metrics["trained"].item()], "fit's validation": []}
    logged["fit's validation"] = [v.item() for k, v in trainer.callback_metrics.items() if k.startswith("validated")]
    weights = {name: value.clone() for name, value in whole_state(trainer, module).items() if name != "metric"}
    found = trainer.validate(module, data, verbose=False)
    logged["validate"] = [v for of_loader in found for k, v in of_loader.items() if k.startswith("validated")]
    logged["test"] = [trainer.test(module, data[0], verbose=False)[0]["tested"]]
    predictions = torch.cat(trainer.predict(module, data[0])).tolist()
    traces = {
        stage: {
            "metric": module.of("metric", stage).sum_value.item(),
            "list": sorted(module.of("list", stage)),
            "module-level list": sorted(OF_THE_MODULE[stage]),
            "dict": module.of("dict", stage)["values"],
        }
        for stage in STAGES
    }
    return {
        "data_rank": trainer.strategy.data_rank,
        "weights": weights,
        "logged": logged,
        "predictions": predictions,
        "traces": traces,
    }


def in_own_loop(strategy: str, number: int) -> dict[str, Any]:
    """Train and evaluate in a custom loop, which weighs each batch as `PreparedLoader.batch_size` says."""
    seed_everything(5, verbose=False)
    engine = Engine(strategy=strategy, accelerator="cpu", precision="64-true")
    net = Tracing(Layout("own loop", 1, lambda: strategy))
    loaders = [DataLoader(samples(number), BATCH) for _ in range(2)]
    trained, validated = (engine.setup_dataloaders(loader, global_batch_size=4) for loader in loaders)
    net, optimizer = engine.setup(net, net.configure_optimizers())
    net.mark_forward_method("errors")
    seen: dict[str, list[float]] = {"training": [], "evaluation": [], "gathered": []}
    for batch in trained:
        seen["training"] += batch[2][: trained.batch_size].tolist()
        engine.backward(net.errors(batch).mean())
        if engine.sync_gradients:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        for batch in validated:
            seen["evaluation"] += batch[2][: validated.batch_size].tolist()
            seen["gathered"] += engine.gather_for_metrics(batch[2] + 0 * net.errors(batch).sum((1, 2))).tolist()
    return {"seen": seen, "weights": {n: v.clone() for n, v in gather_whole(net.state_dict(), is_kept=True).items()}}


class Drawing(Tracing):
    """The same with random numbers in each step, where a rank draws from a generator of its own."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.drawn: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        """The step of each micro-batch, and the states of the generator as it began and ended."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        before = torch.get_rng_state()
        torch.rand(3)
        loss = super().training_step(batch, batch_idx)
        self.drawn.append((self.trainer.global_step, before, torch.get_rng_state()))
        return loss


def draw(strategy: str, number: int) -> list[tuple[int, bool]]:
    """Train two epochs; return what happened to the generator of this rank between each two of its micro-batches.

    That is the number of whole steps in between, of which it had none, and whether the generator is as before them.
    """
    seed_everything(5, verbose=False)
    module = Drawing(Layout("drawing", 1, lambda: strategy))
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        precision="64-true",
        max_epochs=2,
        global_batch_size=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(samples(number), BATCH))
    pairs = pairwise(module.drawn)
    return [(step - earlier - 1, torch.equal(before, ended)) for (earlier, _, ended), (step, before, _) in pairs]


def checked(records):
    """Return the records of all ranks, if none of them failed."""
    for rank, record in enumerate(records):
        assert not isinstance(record, str), f"rank {rank} failed:\n{record}"
    return records


def run_all(processes: int) -> dict[Any, Any]:
    """Run every program for a number of processes; in each of them."""
    warnings.simplefilter("ignore")
    cells = [(layout, number) for layout, number in CELLS if layout.processes == processes]
    loops = [(strategy, n) for (strategy, here), n in NUMBERS_OF_LOOPS if here == processes]
    return {
        **{(layout.title, n): attempt(program, layout, n) for layout, n in cells},
        **{("own loop", strategy, n): attempt(in_own_loop, strategy, n) for strategy, n in loops},
        **{("drawing", name): attempt(draw, name, 9) for name, here in OWN_LOOPS if here == processes},
    }
