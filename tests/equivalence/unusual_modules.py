"""Modules that do what plain ones do not, each on every layout: what is compared with one process."""

import functools
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from matrix import whole_state
from residual import PLAN, Block
from sweep import IS_SWEEP, dealt
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

from echelon import (
    BaseFinetuning,
    DDPOptions,
    DDPStrategy,
    DeviceMapStrategy,
    FSDPStrategy,
    ParallelStrategy,
    Strategy,
    Trainer,
    TrainModule,
    ZeroStrategy,
    seed_everything,
)
from echelon.testing import run_ranks

BATCH = 2
NUM_SAMPLES = 16 if IS_SWEEP else 8
"""Two optimizer steps of an epoch, in a sweep four; those of a large global batch have half as many."""


@dataclass(frozen=True)
class Layout:
    """A strategy on some number of processes, or on several devices of one."""

    title: str
    processes: int
    make: Callable[[], "str | Strategy"]
    global_batch: int = 4
    devices: int | str = "auto"
    fails_on_one: frozenset[str] = frozenset()
    """The modules that fail on one rank while others wait for it, so that no other module can follow them."""
    leaves_out: frozenset[str] = frozenset()
    """Modules that are not tried."""
    always: frozenset[str] = frozenset()
    """Modules that are tried whatever its share: no other layout refuses them as it does."""

    @property
    def kinds(self) -> list[str]:
        """The modules that are tried: all in one process; elsewhere, but for a sweep, a share of them each.

        Each module is tried on shards or in stages, each second one on one of the other layouts of two processes, and
        each sixth one on one of the larger layouts, where much is as on two.
        """
        others = [layout.title for layout in LAYOUTS if layout.processes == 2 and layout.title not in CUT]
        large = [layout.title for layout in LAYOUTS if layout.processes > 2]
        met = [
            pair
            for layouts, each in ((CUT, 1), (others, 2), (large, 6))
            for pair in dealt(list(MODULES)[:: 1 if IS_SWEEP else each], layouts, (0,))
        ]
        share = {kind for kind, title in met if title == self.title} | self.always
        return [kind for kind in MODULES if kind not in self.leaves_out and (kind in share or self.processes == 1)]


CUT = ("fsdp x 2", "pp x 2")
"""Layouts of two processes that cut a module, for which most of what cannot be trained is refused."""
REFUSED_ON_SHARDS = frozenset(("functional_call of a block", "a penalty on weights", "an embedding with max_norm"))
REFUSED_IN_STAGES = frozenset(("auxiliary losses in attributes", "forward hooks", "recorded outputs"))
FAIL_ON_ONE_STAGE = frozenset(("early exit", "gradient penalty", "a penalty on weights"))
AS_THESE = frozenset(("heads by task", "experts by task", "a block called twice"))
"""Modules that a pipeline refuses as it does the former."""
LAYOUTS = [
    Layout("dp x 2", 1, lambda: "dp", devices=2),
    Layout("device_map", 1, lambda: DeviceMapStrategy({"": "cpu"})),
    Layout("ddp x 2", 2, lambda: DDPStrategy(find_unused_parameters=True), always=frozenset(("early exit",))),
    Layout("zero x 2", 2, lambda: ZeroStrategy(ddp=DDPOptions(find_unused_parameters=True))),
    Layout("fsdp x 2", 2, lambda: "fsdp", always=REFUSED_ON_SHARDS | AS_THESE),
    Layout("tp x 2", 2, lambda: ParallelStrategy(tp=2)),
    Layout("cp x 2", 2, lambda: ParallelStrategy(cp=2), always=frozenset(("gradient penalty", "packed sequences"))),
    Layout(
        "pp x 2",
        2,
        lambda: ParallelStrategy(pp=2),
        fails_on_one=FAIL_ON_ONE_STAGE,
        leaves_out=AS_THESE,
        always=FAIL_ON_ONE_STAGE | REFUSED_IN_STAGES,
    ),
    Layout("ps x 2 + 1 server", 2, lambda: "ps"),
    Layout("hsdp 2 x 2", 4, lambda: FSDPStrategy(replicate=2), global_batch=8),
    Layout("tp 2 x fsdp 2", 4, lambda: ParallelStrategy(dp_shard=2, tp=2)),
    Layout(
        "pp 2 x fsdp 2",
        4,
        lambda: ParallelStrategy(pp=2, dp_shard=2),
        global_batch=8,
        leaves_out=AS_THESE | FAIL_ON_ONE_STAGE,
    ),
]


class Plain(TrainModule):
    """A regression on sequences of 4, with nothing unusual; others change one thing."""

    tp_plan = PLAN
    precision = "64-true"

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(3, 4), nn.ModuleList(Block() for _ in range(2)), nn.Linear(4, 1)

    def hidden(self, x: torch.Tensor, task: int) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, x: torch.Tensor, y: torch.Tensor, task: int) -> torch.Tensor:
        return (self.head(self.hidden(x, task)) - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, tasks = batch
        loss = self.loss(x, y, int(tasks[0]))
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class HeadsByTask(Plain):
    """Has a head for each task, of one size; a batch is of one task."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))

    def loss(self, x: torch.Tensor, y: torch.Tensor, task: int) -> torch.Tensor:
        x = self.hidden(x, task)
        return (self.head(x) + self.heads[task](x) - y).square().mean()


class ExpertsByTask(Plain):
    """Has an expert for each task beside the blocks; a batch is of one task."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(2))

    def loss(self, x: torch.Tensor, y: torch.Tensor, task: int) -> torch.Tensor:
        return (self.head(self.experts[task](self.hidden(x, task))) - y).square().mean()


class EarlyExit(Plain):
    """Leaves out the last block for one of the tasks."""

    def hidden(self, x: torch.Tensor, task: int) -> torch.Tensor:
        x = self.blocks[0](self.embed(x))
        return self.blocks[1](x) if task else x


class Unfreezing(Plain):
    """Trains all of its layers from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.requires_grad_(True)


class Freezing(Plain):
    """Freezes some of its layers after the first epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.embed.requires_grad_(False)
            self.blocks[0].requires_grad_(False)


class FineTuned(Plain):
    """Begins with its head alone; a callback unfreezes other layers, in parameter groups with rates of their own."""

    def configure_callbacks(self) -> Any:
        return FineTuning()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


class FineTuning(BaseFinetuning):
    """Unfreezes the blocks with the second epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.embed, pl_module.blocks])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks, optimizer, lr=0.02)


class Reset(Plain):
    """Draws a layer anew when training starts."""

    def on_fit_start(self) -> None:
        nn.init.normal_(self.embed.weight, std=0.3)


class Noise(Plain):
    """Adds noise to a layer after each step."""

    def on_train_step_end(self) -> None:
        with torch.no_grad():
            self.embed.bias.add_(0.1 * torch.randn_like(self.embed.bias))


class TiedByStorage(Plain):
    """Has two parameters in one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight.data = self.first.weight.data

    def loss(self, x: torch.Tensor, y: torch.Tensor, task: int) -> torch.Tensor:
        return (self.head(self.second(torch.tanh(self.first(self.hidden(x, task))))) - y).square().mean()


class Outside(Plain):
    """Trains parameters that are not the module's."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = [nn.Parameter(torch.ones(4))]

    def loss(self, x: torch.Tensor, y: torch.Tensor, task: int) -> torch.Tensor:
        return (self.head(self.hidden(x, task) * self.scales[0]) - y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.scales], lr=0.05, momentum=0.9)


class GradientPenalty(Plain):
    """Penalizes the gradient of its output with respect to its input."""

    def loss(self, x: torch.Tensor, y: torch.Tensor, task: int) -> torch.Tensor:
        x = x.detach().requires_grad_()
        output = self.head(self.hidden(x, task))
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return (output - y).square().mean() + gradient.square().mean()


class AuxiliaryBlock(Block):
    """A block that leaves an auxiliary loss in an attribute."""

    auxiliary: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.auxiliary = x.square().mean()
        return x


class AuxiliaryLosses(Plain):
    """Adds what its blocks leave in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AuxiliaryBlock() for _ in range(2))

    def loss(self, x: torch.Tensor, y: torch.Tensor, task: int) -> torch.Tensor:
        return super().loss(x, y, task) + 0.1 * sum(block.auxiliary for block in self.blocks)


class ForwardHooks(Plain):
    """Adds what forward hooks collect."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[torch.Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(self.collect)

    def collect(self, part: Any, inputs: Any, output: torch.Tensor) -> None:
        self.collected.append(output.square().mean())

    def loss(self, x: torch.Tensor, y: torch.Tensor, task: int) -> torch.Tensor:
        self.collected.clear()
        return super().loss(x, y, task) + 0.1 * torch.stack(self.collected).sum()


class ChangingHooks(Plain):
    """Has hooks of modules that replace inputs, outputs and gradients."""

    def __init__(self) -> None:
        super().__init__()
        for part in (*self.blocks, self.head):
            part.register_forward_pre_hook(lambda _, inputs: (1.1 * inputs[0],))
            part.register_forward_hook(lambda _, inputs, output: 0.9 * output)
            part.register_full_backward_pre_hook(lambda _, gradients: (0.8 * gradients[0],))
            part.register_full_backward_hook(lambda _, inputs, outputs: (0.7 * inputs[0],))


class Filter(nn.Module):
    """A layer with a complex parameter and a complex buffer, as Fourier layers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.register_buffer("phases", torch.exp(1j * torch.arange(4)).to(torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(self.weight * self.phases * x).sum(-1)


class Complex(Plain):
    """Has a layer with complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = Filter()

    def hidden(self, x: torch.Tensor, task: int) -> torch.Tensor:
        x = super().hidden(x, task)
        return x + self.filter(x)


class MixedDtypes(Plain):
    """Has layers in double and one in single precision."""

    precision = "32-true"

    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.single = nn.Linear(4, 4, dtype=torch.float32)

    def hidden(self, x: torch.Tensor, task: int) -> torch.Tensor:
        x = super().hidden(x, task)
        return x + self.single(x.float()).double()


class EvalMode(Plain):
    """Is in eval mode when it is given to the trainer, with a dropout and a batch norm that notice."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm = nn.Dropout(), nn.BatchNorm1d(4)
        self.eval()

    def hidden(self, x: torch.Tensor, task: int) -> torch.Tensor:
        x = self.drop(super().hidden(x, task))
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class RecordedOutputs(Plain):
    """A language model of transformers whose hidden states are read."""

    tp_plan = None

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=12,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=8,
            use_cache=False,
        )
        del self.embed, self.blocks, self.head
        self.model = LlamaForCausalLM(config)

    def loss(self, x: torch.Tensor, y: torch.Tensor, task: int) -> torch.Tensor:
        tokens = (x.sum(2) * 100).long() % 12
        found = self.model(input_ids=tokens, output_hidden_states=True)
        return (found.logits.mean(2, keepdim=True) - y).square().mean() + found.hidden_states[1].square().mean()


class CalledTwice(Plain):
    """Calls a block twice."""

    def hidden(self, x: torch.Tensor, task: int) -> torch.Tensor:
        return self.blocks[0](super().hidden(x, task))


class WeightPenalty(Plain):
    """Adds a penalty on weights that it reads itself."""

    def loss(self, x: torch.Tensor, y: torch.Tensor, task: int) -> torch.Tensor:
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        return super().loss(x, y, task) + 0.01 * penalty


class Clamped(Plain):
    """Clamps its weights after each step."""

    def on_train_step_end(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.3, 0.3)


class Normalized(Plain):
    """Has a layer whose weight is a function of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.normalized = weight_norm(nn.Linear(4, 4))

    def hidden(self, x: torch.Tensor, task: int) -> torch.Tensor:
        return self.normalized(super().hidden(x, task))


class RescaledRows(Plain):
    """Has an embedding that rescales the rows that it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 4, max_norm=0.5)

    def hidden(self, x: torch.Tensor, task: int) -> torch.Tensor:
        return super().hidden(x, task) + self.table((x.sum(2) * 100).long() % 12)


class FunctionalCall(Plain):
    """Calls a block with other weights than its own."""

    def hidden(self, x: torch.Tensor, task: int) -> torch.Tensor:
        x = self.blocks[0](self.embed(x))
        others = {name: 1.5 * weight for name, weight in self.blocks[1].named_parameters()}
        return torch.func.functional_call(self.blocks[1], others, (x,))


class Packed(Plain):
    """Packs sequences of several lengths for a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(4, 4, batch_first=True)

    def hidden(self, x: torch.Tensor, task: int) -> torch.Tensor:
        lengths = (x[:, 0, 0] > 0).cpu() + 3
        packed = nn.utils.rnn.pack_padded_sequence(
            super().hidden(x, task), lengths, batch_first=True, enforce_sorted=False
        )
        output, _ = self.recurrent(packed)
        return nn.utils.rnn.pad_packed_sequence(output, batch_first=True, total_length=4)[0]


class Jacobian(Plain):
    """Penalizes the Jacobian of its head, which functions of ``torch.func`` compute."""

    def loss(self, x: torch.Tensor, y: torch.Tensor, task: int) -> torch.Tensor:
        hidden = self.hidden(x, task)
        slopes = torch.func.vmap(torch.func.jacrev(lambda one: self.head(one).tanh()))(hidden.flatten(0, 1))
        return (self.head(hidden) - y).square().mean() + slopes.square().mean()


class Lazy(Plain):
    """Has a layer that learns the size of its input in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(4)

    def hidden(self, x: torch.Tensor, task: int) -> torch.Tensor:
        return self.lazy(super().hidden(x, task))


class TargetNetwork(Plain):
    """Has a frozen copy of a layer that follows it after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(4, 1).requires_grad_(False)

    def loss(self, x: torch.Tensor, y: torch.Tensor, task: int) -> torch.Tensor:
        hidden = self.hidden(x, task)
        output = self.head(hidden)
        return (output - y).square().mean() + 0.1 * (output - self.target(hidden).detach()).square().mean()

    def on_train_step_end(self) -> None:
        with torch.no_grad():
            for own, followed in zip(self.target.parameters(), self.head.parameters(), strict=True):
                own.lerp_(followed, 0.5)


class TargetTokens(Plain):
    """Returns the mean over target tokens, whose number differs from sample to sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, tasks = batch
        scores = self.head(self.hidden(x, int(tasks[0])))
        labels = (y > 0).long().masked_fill(x[..., :1] > 0.5, -100).flatten()
        loss = nn.functional.cross_entropy(torch.cat([scores, -scores], 2).flatten(0, 1), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=int((labels >= 0).sum()))
        return loss


MODULES: dict[str, type[Plain]] = {
    "plain": Plain,
    "heads by task": HeadsByTask,
    "experts by task": ExpertsByTask,
    "early exit": EarlyExit,
    "unfreezing": Unfreezing,
    "freezing": Freezing,
    "fine-tuning in groups": FineTuned,
    "reset": Reset,
    "noise in a hook": Noise,
    "ties by storage": TiedByStorage,
    "outside parameters": Outside,
    "gradient penalty": GradientPenalty,
    "auxiliary losses in attributes": AuxiliaryLosses,
    "forward hooks": ForwardHooks,
    "hooks that change values": ChangingHooks,
    "complex": Complex,
    "mixed dtypes": MixedDtypes,
    "eval mode": EvalMode,
    "recorded outputs": RecordedOutputs,
    "a block called twice": CalledTwice,
    "a penalty on weights": WeightPenalty,
    "clamped weights": Clamped,
    "weight norm": Normalized,
    "an embedding with max_norm": RescaledRows,
    "functional_call of a block": FunctionalCall,
    "packed sequences": Packed,
    "a Jacobian": Jacobian,
    "a lazy layer": Lazy,
    "target network": TargetNetwork,
    "target tokens": TargetTokens,
}


@dataclass(frozen=True)
class End:
    """How a module ended on a rank: its weights and last loss, or an error with its notes."""

    state: dict[str, torch.Tensor] | None = None
    loss: float | None = None
    error: str | None = None


def built(title: str) -> TrainModule:
    """Return a module with the same weights in every call."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return MODULES[title]()


def samples(number: int = 16) -> TensorDataset:
    """Return sequences of 4, their targets, and their tasks: each batch of 2 has one, and its neighbour the other."""
    x = torch.randn(number, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, torch.sin(x.sum(dim=2, keepdim=True)), torch.arange(number) // BATCH % 2)


def train(layout: Layout, module: Any, number: int = 16) -> End:
    """Train two epochs on a number of samples, and return how it ended."""
    with warnings.catch_warnings(action="ignore"):  # some of the modules are warned about
        return _train(layout, module, number)


def _train(layout: Layout, module: Any, number: int) -> End:
    seed_everything(5, verbose=False)
    try:
        trainer = Trainer(
            strategy=layout.make(),
            accelerator="cpu",
            devices=layout.devices,
            precision=module.precision,
            max_epochs=2,
            global_batch_size=layout.global_batch,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(samples(number), BATCH))
        state = {name: value.clone() for name, value in whole_state(trainer, module).items()}
        return End(state, trainer.callback_metrics["loss"].item())
    except Exception:  # noqa: BLE001 - the test shows it, and the other modules still run
        return End(error=traceback.format_exc())


def train_all(processes: int, modules: dict[tuple[str, str], Any], number: int = 16) -> dict[tuple[str, str], End]:
    """Train the modules, which the starting process has built, on each layout; in one of its processes."""
    layouts = {layout.title: layout for layout in LAYOUTS if layout.processes == processes}
    return {(at, kind): train(layouts[at], module, number) for (at, kind), module in modules.items()}


def ends_of(processes: int) -> list[dict[tuple[str, str], End]]:
    """Return how every module ended on each layout of a number of processes, on each rank."""
    layouts = [layout for layout in LAYOUTS if layout.processes == processes]
    together = [(layout.title, kind) for layout in layouts for kind in layout.kinds if kind not in layout.fails_on_one]
    alone = [[(layout.title, kind)] for layout in layouts for kind in sorted(layout.fails_on_one)]
    found: list[dict[tuple[str, str], End]] = [{} for _ in range(processes)]
    for cells in (together, *alone):
        modules = {(title, kind): built(kind) for title, kind in cells}
        starts = (
            [train_all(1, modules, NUM_SAMPLES)]
            if processes == 1
            else run_ranks(train_all, processes, processes, modules, NUM_SAMPLES, timeout=420)
        )
        for rank, ends in zip(found, starts, strict=True):
            rank.update(ends)
    return found


@functools.cache
def alone(global_batch: int, kind: str) -> End:
    """Return how a module ends in one process that takes the same steps."""
    return train(Layout("single", 1, lambda: "single", global_batch, devices=1), built(kind), NUM_SAMPLES)
