"""Four kinds of modules whose steps are estimated, and functions that measure a step on real ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from echelon import Callback, Experts, Trainer, TrainModule
from echelon.strategies import Hardware
from echelon.strategies.cluster.environment import reconcile_environment
from echelon.strategies.cluster.launchers import detect_environment
from echelon.strategies.module.memory_estimate import KeptForBackward, held_memory, size_of
from echelon.trainer.planning.profiling import ProfilingStrategy, take_profile

BATCH = 8
CLOSE = {"parameters": 0.02, "gradients": 0.02, "optimizer": 0.02, "activations": 0.15, "traffic": 0.05}
"""The relative errors that estimates may have."""


class Classifier(TrainModule):
    def __init__(self):
        super().__init__()
        self.build()

    def training_step(self, batch, batch_idx):
        images, classes = batch
        return F.cross_entropy(self(images), classes)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class DigitsCNN(Classifier):
    """Convolutions with batch norms, whose buffers are sent, in blocks of one class."""

    inputs, num_classes = (1, 16, 16), 10

    def build(self):
        self.stem = nn.Conv2d(1, 32, 3, padding=1)
        self.blocks = nn.Sequential(*(self.block() for _ in range(3)))
        self.head = nn.Linear(32 * 8 * 8, 10)

    def block(self):
        return nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())

    def forward(self, images):
        return self.head(F.max_pool2d(self.blocks(self.stem(images)), 2).flatten(1))


class Block(nn.Module):
    def __init__(self, width, head_width=16, is_causal=True):
        super().__init__()
        self.head_width, self.is_causal = head_width, is_causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))
        self.up_proj, self.down_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        normed = self.norm1(x)
        query, key, value = (
            project(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        x = x + self.o_proj(attended.transpose(1, 2).flatten(-2))
        return x + self.down_proj(F.gelu(self.up_proj(self.norm2(x))))


class GPT(TrainModule):
    """Causal attention over tokens, with a head as large as the rest."""

    width, context, num_tokens, depth = 64, 64, 512, 3

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(self.num_tokens, self.width)
        self.position = nn.Embedding(self.context, self.width)
        self.blocks = nn.ModuleList(Block(self.width) for _ in range(self.depth))
        self.norm, self.head = nn.LayerNorm(self.width), nn.Linear(self.width, self.num_tokens, bias=False)

    def training_step(self, batch, batch_idx):
        tokens, targets = batch
        x = self.token(tokens) + self.position(self.trainer.strategy.positions(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Mixing(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(width), Experts(width, 48, 4, top_k=4)

    def forward(self, x):
        return x + self.experts(self.norm(x))


class ShortGPT(GPT):
    """A block for each of two stages."""

    depth = 2


class MixedGPT(ShortGPT):
    """Each token uses all experts, so that all ranks get as many."""

    def __init__(self):
        super().__init__()
        for index in range(self.depth):
            self.blocks[index] = Mixing(self.width)


class ViT(Classifier):
    """Patches of images, with a parameter outside the layers."""

    inputs, num_classes = (3, 32, 32), 10

    def build(self):
        self.patches = nn.Conv2d(3, 64, 4, stride=4)
        self.position = nn.Parameter(torch.zeros(64, 64))
        self.blocks = nn.ModuleList(Block(64, is_causal=False) for _ in range(3))
        self.norm, self.classes = nn.LayerNorm(64), nn.Linear(64, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.classes(self.norm(x).mean(1))


class HugeEmbedding(Classifier):
    """One parameter holds most of the elements, so that ranks cannot share them evenly."""

    inputs, num_classes = None, 10

    def build(self):
        self.table = nn.Embedding(4001, 32)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))
        self.out_head = nn.Linear(32, 10)

    def forward(self, indices):
        return self.out_head(self.layers(self.table(indices)))


MODULES = (DigitsCNN, GPT, ViT, HugeEmbedding)


def loader(kind, num_batches=3):
    """Return a loader of whole batches for each of the ranks."""
    ranks = dist.get_world_size() if dist.is_initialized() else 4
    number = BATCH * num_batches * ranks
    if hasattr(kind, "samples"):
        return DataLoader(TensorDataset(*kind.samples(number)), BATCH)
    if issubclass(kind, GPT):
        tokens = torch.randint(GPT.num_tokens, (number, GPT.context))
        return DataLoader(TensorDataset(tokens, tokens), BATCH)
    classes = torch.randint(10, (number,))
    inputs = torch.randn(number, *kind.inputs) if kind.inputs else torch.randint(4001, (number,))
    return DataLoader(TensorDataset(inputs, classes), BATCH)


def settings_of(**settings):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    return {**quiet, "enable_model_summary": False, **settings}


def profile_of(kind, *, size=None, **settings):
    """Return the profile of a module's step on tensors without memory."""
    module = kind()

    def fit(strategy, callback):
        trainer = Trainer(**settings_of(strategy=strategy, devices=1, max_steps=3, callbacks=[callback], **settings))
        trainer.fit(module, loader(kind))

    return take_profile(fit, module, ProfilingStrategy(num_samples=size))


def hardware_of(world_size):
    """Return the hardware of a number of ranks on this machine that are never started."""
    environment = reconcile_environment(detect_environment({}), world_size, None)
    return Hardware("cpu", (0,), 1).for_processes(environment)


class CountedTraffic(TorchDispatchMode):
    """Counts what this rank sends if every collective is a ring."""

    def __init__(self):
        super().__init__()
        self.sent = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("c10d::")
        if func.namespace == "c10d":
            self.sent += self._sent(name, args)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _sent(name, args):
        group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        size = dist.ProcessGroup.unbox(group).size()
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if any(tensor.is_sparse for tensor in tensors):  # each rank gets the rows of all others
            return sum(size_of(tensor) for tensor in tensors) * (size - 1)
        most = sum(sorted(tensor.nbytes for tensor in tensors)[-1:] if "base" in name else (t.nbytes for t in tensors))
        return most * (size - 1) / size * (2 if name.startswith("allreduce") else 1)


class MeasuredStep(Callback):
    """Measures the second step of this rank: what it holds, keeps for backward and sends."""

    traffic = None

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 1:
            if self.traffic is None:  # a step may have several micro-batches
                self.traffic = CountedTraffic()
                self.traffic.__enter__()
            self.kept, self.is_forward = KeptForBackward(), True
            self.kept.__enter__()

    def on_before_backward(self, trainer, module, loss):
        if trainer.global_step == 1 and self.is_forward:  # a step by hand may have several
            self.is_forward = False
            self.kept.__exit__()

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step == 1:
            self.gradients = held_memory(module, []).gradients

    def on_train_step_end(self, trainer, module):
        if trainer.global_step == 2:
            self.traffic.__exit__(None, None, None)
            held = held_memory(module, trainer.optimizers)
            self.measured = {
                "parameters": held.parameters,
                "gradients": self.gradients,
                "optimizer": held.optimizer,
                "activations": self.kept.num_bytes,
                "traffic": self.traffic.sent,
            }
            trainer.should_stop = True


def misestimated(label, estimate, measured):
    """Return a line for each number of an estimate that is not close to what was measured."""
    estimated = {**estimate.by_kind, "traffic": estimate.sent}
    return [
        f"{label}: {what} {measured[what]:,.0f} measured, {estimated[what]:,.0f} estimated, {estimate.traffic}"
        for what, close in CLOSE.items()
        if measured[what] != pytest.approx(estimated[what], rel=close, abs=64)
    ]


def measure(kind, strategy, **settings):
    """Return what the rank with the largest memory holds and sends in a step; collective."""
    measured = MeasuredStep()
    torch.manual_seed(0)
    trainer = Trainer(**settings_of(strategy=strategy, max_steps=3, callbacks=[measured], **settings))
    trainer.fit(kind(), loader(kind))
    everything = trainer.strategy.all_gather_object(measured.measured)
    means = {"traffic": sum(one["traffic"] for one in everything) / len(everything)}  # an owner sends, others get
    return {name: max(one[name] for one in everything) for name in everything[0]} | means
