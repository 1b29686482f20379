"""Faults that are put into a run on purpose, and that guards must find: what each says."""

import os
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from unusual_modules import BATCH, Plain, built, samples

from echelon import Callback, LocalSGDStrategy, ParallelStrategy, Trainer, seed_everything
from echelon.strategies.state.dtensor import local_shard

PROCESSES = 2
LEFT_BY_BLOCKS: dict[str, torch.Tensor] = {}
"""A module-level mapping through which a block reaches the step."""


class At(Callback):
    """Does something at a hook of a run."""

    def __init__(self, hook: str, act: Callable[[Any, Any], None]) -> None:
        self.hook, self.act = hook, act

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._act("on_fit_start", trainer, module)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self._act("on_before_optimizer_step", trainer, module)

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        self._act("on_train_step_end", trainer, module)

    def _act(self, hook: str, trainer: Any, module: Any) -> None:
        if hook == self.hook:
            with torch.no_grad():
                self.act(trainer, module)


def nudge(trainer: Any, module: Any) -> None:
    """Change one number of one weight on one rank, in the third step."""
    if trainer.global_rank == 1 and trainer.global_step == 3:
        module.blocks[1].down.weight.view(-1)[5] += 1e-9


def warm_up_alone(trainer: Any, module: Any) -> None:
    """Set the learning rate of one rank."""
    if trainer.global_rank == 1:
        trainer.optimizers[0].param_groups[0]["lr"] *= 1.01


def clip_alone(trainer: Any, module: Any) -> None:
    """Scale the gradients of a rank by a number that is its own."""
    module.head.weight.grad *= 1 + 0.1 * trainer.global_rank


def initialize_by_rank(trainer: Any, module: Any) -> None:
    """Draw a layer from a generator that is seeded by the rank."""
    module.embed.weight.normal_(generator=torch.Generator().manual_seed(trainer.global_rank))


def write_a_norm(trainer: Any, module: Any) -> None:
    """Write, into a layer that tensor parallelism repeats, what only one rank has."""
    if trainer.global_rank == 1:
        local_shard(module.head.bias).add_(1e-6)


class Leaving(Plain):
    """Has a block that leaves a tensor in a module-level mapping, which the step adds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_forward_hook(leave)

    def loss(self, x: torch.Tensor, y: torch.Tensor, task: int) -> torch.Tensor:
        loss = super().loss(x, y, task)
        return loss + LEFT_BY_BLOCKS.get("first", loss).mean()


def leave(part: Any, inputs: Any, output: torch.Tensor) -> None:
    LEFT_BY_BLOCKS["first"] = output.detach()


class Pooling(Plain):
    """Pools over the sequence before the head."""

    def loss(self, x: torch.Tensor, y: torch.Tensor, task: int) -> torch.Tensor:
        return (self.head(torch.tanh(self.hidden(x, task).mean(1))) - y.mean(1)).square().mean()


class Files(Dataset[Any]):
    """Samples by the names of files, in the order in which a file system happened to list them."""

    def __init__(self, rank: int) -> None:
        names = [f"{index}.txt" for index in range(16)]
        self.files = names[::-1] if rank else names
        self.samples = samples()

    def __getitem__(self, index: int) -> Any:
        return self.samples[int(self.files[index].partition(".")[0])]

    def __len__(self) -> int:
        return len(self.files)


class Stream(IterableDataset[Any]):
    """A stream that every rank reads whole."""

    def __iter__(self) -> Any:
        yield from samples()


class Keeping(Callback):
    """A callback whose state has an object that no checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {"last": object()}}


def run(rank: int, fault: str) -> str:
    """Run with a fault, and return what the run said: its error, or its warnings."""
    strategy, kind, callbacks, data, checkpoints = FAULTS[fault]
    seed_everything(5, verbose=False)
    module = kind() if kind is not Plain else built("plain")
    loader = data(rank)
    sizes = {} if isinstance(loader.dataset, IterableDataset) else {"global_batch_size": 4}
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            trainer = Trainer(
                strategy=strategy(),
                accelerator="cpu",
                precision="64-true",
                max_epochs=2,
                callbacks=callbacks(),
                logger=False,
                enable_checkpointing=checkpoints,
                enable_progress_bar=False,
                enable_model_summary=False,
                **sizes,
            )
            trainer.fit(module, loader)
        except Exception:  # noqa: BLE001 - the test reads it
            return f"after step {trainer.global_step}: {traceback.format_exc()}"
    return "\n".join(str(warning.message) for warning in caught)


def plain_data(rank: int) -> Any:
    return DataLoader(samples(), BATCH)


def at(hook: str, act: Callable[[Any, Any], None]) -> Callable[[], list[Callback]]:
    return lambda: [At(hook, act)]


FAULTS: dict[str, tuple[Callable[[], Any], type[Plain], Callable[[], list[Callback]], Callable[[int], Any], bool]] = {
    "a number nudged": (lambda: "ddp", Plain, at("on_train_step_end", nudge), plain_data, False),
    "a rate of its own": (lambda: "ddp", Plain, at("on_fit_start", warm_up_alone), plain_data, False),
    "gradients scaled": (lambda: "ddp", Plain, at("on_before_optimizer_step", clip_alone), plain_data, False),
    "a seed of its own": (lambda: "zero", Plain, at("on_fit_start", initialize_by_rank), plain_data, False),
    "averages apart": (
        lambda: LocalSGDStrategy(warmup_steps=100),
        Plain,
        at("on_train_step_end", nudge),
        plain_data,
        False,
    ),
    "a repeated layer": (
        lambda: ParallelStrategy(tp=2),
        Plain,
        at("on_train_step_end", write_a_norm),
        plain_data,
        False,
    ),
    "a module-level mapping": (lambda: ParallelStrategy(pp=2), Leaving, list, plain_data, False),
    "pooling": (lambda: ParallelStrategy(cp=2), Pooling, list, plain_data, False),
    "files in another order": (lambda: "ddp", Plain, list, lambda rank: DataLoader(Files(rank), BATCH), False),
    "fewer samples": (lambda: "ddp", Plain, list, lambda rank: DataLoader(samples(16 - 2 * rank), BATCH), False),
    "a whole stream": (lambda: "ddp", Plain, list, lambda rank: DataLoader(Stream(), BATCH), False),
    "an object in a callback": (lambda: "single", Plain, lambda: [Keeping()], plain_data, True),
}


def run_all() -> dict[str, str]:
    """Run with every fault, in one of the processes."""
    return {fault: run(int(os.environ["RANK"]), fault) for fault in FAULTS if fault != "an object in a callback"}
