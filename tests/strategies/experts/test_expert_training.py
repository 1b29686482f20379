"""Experts dealt over ranks train as in one process: unmodified models, ranks without tokens, checkpoints, memory."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from recording_logger import RecordingLogger
from small import quiet
from sweep import IS_SWEEP, dealt
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import (
    ConfigError,
    EMAWeightAveraging,
    ExpertBalance,
    Experts,
    ModelCheckpoint,
    ModuleError,
    ParallelStrategy,
    TrainModule,
    seed_everything,
)
from echelon.testing import run_ranks

TEXT = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 32, "vocab_size": 24, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "initializer_range": 0.3,
}  # fmt: skip
MODELS = {
    "Mixtral": {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1},
    "Qwen3Moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "head_dim": 8,
        "moe_intermediate_size": 8,
    },
    "DeepseekV3": {
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
        "moe_intermediate_size": 8,
    },
}  # fmt: skip
SAVED_AT, LAST = 3, 5


class Words(TrainModule):
    """Trains an unmodified model of transformers."""

    def __init__(self, name: str) -> None:
        import transformers

        super().__init__()
        config = getattr(transformers, f"{name}Config")(**TEXT | MODELS[name])
        self.model = getattr(transformers, f"{name}ForCausalLM")(config)
        self.model.set_experts_implementation("eager")  # torch has no grouped product in float64

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = self.model(batch[0], labels=batch[0]).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(6), Experts(6, 4, 4, shared_hidden=3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.experts(self.norm(x))
        return out


class Mixture(TrainModule):
    """Blocks with experts; of one, all tokens choose the first two experts, so that some ranks get none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 1)
        self.build()

    def build(self) -> None:
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.blocks[1].experts.selection_bias[:2] += 2.0  # type: ignore[union-attr, operator]
        self.last = self._modules.pop("last")  # type: ignore[assignment] # after the blocks, as stages need it

    def training_step(self, batch: list[Tensor]) -> Tensor:
        x = self.first(batch[0])
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.last(x), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.03)


class Late(Mixture):
    """Built where the strategy decides."""

    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            Mixture.build(self)


class Mean(nn.Module):
    """Experts whose output for a token depends on how many experts it has."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 6, 6))

    def forward(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        outputs = torch.einsum("nw,nkwv->nkv", tokens, self.up[experts])
        return (outputs * weights[..., None]).mean(1)


class Wrong(Mixture):
    """Calls its experts with what a test says."""

    def __init__(self, layer: nn.Module, num_experts: int) -> None:
        super().__init__()
        self.blocks, self.num_experts = nn.ModuleList([layer]), num_experts

    def training_step(self, batch: list[Tensor]) -> Tensor:
        x = self.first(batch[0])
        experts = torch.arange(1, 2 * len(x) + 1).view(-1, 2) % self.num_experts
        out: Tensor = self.blocks[0](x, experts, torch.ones_like(x[:, :2])).sum()
        return out


def fit(module: TrainModule, *callbacks: Any, strategy: Any = "single", ckpt_path: Any = None, **settings: Any) -> Any:
    """Train and return the trainer; global batches are of 8 samples, and the fourth has only 5."""
    x = torch.randn(29, 5, generator=torch.Generator().manual_seed(1)).double()
    if isinstance(module, Words):
        data = TensorDataset(torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(1)))
        sizes: dict[str, Any] = {"accumulate_grad_batches": 2 if strategy == "single" else 1}
    else:
        data, sizes = TensorDataset(x, x.sin().sum(1, keepdim=True)), {"global_batch_size": 8}
    settings = {"max_steps": LAST, "precision": "64-true", "gradient_clip_val": 0.5, **sizes, **settings}
    saves = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    trainer = quiet(strategy=strategy, callbacks=list(callbacks), enable_checkpointing=saves, **settings)
    trainer.fit(module, DataLoader(data, 2), ckpt_path=ckpt_path)
    return trainer


def words(name: str, **settings: Any) -> dict[str, Tensor]:
    seed_everything(2, verbose=False)
    state: dict[str, Tensor] = fit(Words(name), max_steps=2, **settings).strategy.full_model_state()
    return state


def all_words() -> dict[str, dict[str, Tensor]]:
    strategy = partial(ParallelStrategy, dp_shard=2, ep=2)
    # one of them recomputes its activations, exchanges included
    ways: dict[str, Any] = {"Qwen3Moe": {"activation_checkpointing": "full"}}
    return {name: words(name, strategy=strategy(), **ways.get(name, {})) for name in MODELS}


def test_unmodified_models_of_transformers_take_the_steps_of_one_process() -> None:
    pytest.importorskip("transformers")
    ends = run_ranks(all_words, 2)[0]
    for name, end in ends.items():
        # routers and norms of transformers compute in float32
        torch.testing.assert_close(end, words(name), rtol=0, atol=1e-8, msg=lambda text, n=name: f"{n}: {text}")


# --- checkpoints of each layout, read by each layout -----------------------------------------------------------------

LAYOUTS: dict[str, tuple[int, Any]] = {
    "single": (1, lambda: "single"),
    "ep x 2": (2, partial(ParallelStrategy, dp_shard=2, ep=2)),
    **({"fsdp x 4": (4, lambda: "fsdp")} if IS_SWEEP else {}),
    "fsdp 2 x ep 2, deferred": (4, partial(ParallelStrategy, dp_shard=4, ep=2, deferred_init=True)),
    "pp 2 x ep 2, deferred": (4, partial(ParallelStrategy, pp=2, dp_shard=2, ep=2, deferred_init=True)),
}


def mixture(layout: str, folder: Path, steps: int, ckpt_path: Path | None = None) -> Any:
    seed_everything(2, verbose=False)
    module = Late() if "deferred" in layout else Mixture()
    saving = ModelCheckpoint(folder, filename="saved", every_n_train_steps=SAVED_AT)
    return fit(module, saving, EMAWeightAveraging(0.8), strategy=LAYOUTS[layout][1](), max_steps=steps,
               ckpt_path=ckpt_path)  # fmt: skip


def write(number: int, root: Path) -> dict[str, list[float]]:
    """Save a checkpoint of each layout of a number of processes; return the shares of parameters that ranks hold."""
    shares = {}
    for layout in (name for name, (processes, _) in LAYOUTS.items() if processes == number):
        strategy = mixture(layout, root / layout, SAVED_AT).strategy
        blocks = strategy.module.blocks  # each on another stage, where there are stages
        stack = next(block.experts.stack for block in blocks if not block.experts.stack.down.is_meta)
        held = [p.to_local().numel() / p.numel() if number > 1 else 1.0 for p in stack.parameters()]
        shares[layout] = [*held, *(strategy.memory_share.parameters(p) for p in stack.parameters())]
    return shares


def read(number: int, root: Path, scratch: Path) -> dict[tuple[str, str], dict[str, Tensor]]:
    return {
        (reader, writer): mixture(
            reader, scratch / reader / writer, LAST, root / writer / "saved.ckpt"
        ).strategy.full_model_state()
        for reader, writer in dealt(list(LAYOUTS), list(LAYOUTS), (1,))
        if LAYOUTS[reader][0] == number
    }


def on_ranks(function: Any, *args: Any) -> dict[Any, Any]:
    ends = [function(1, *args), *(run_ranks(function, number, number, *args)[0] for number in (2, 4))]
    return {key: value for end in ends for key, value in end.items()}


@pytest.mark.only_in_sweep  # test_load_matrix.py has the layouts without experts
@pytest.mark.sweep
def test_every_layout_resumes_from_the_checkpoints_of_others(tmp_path: Path) -> None:
    expected = mixture("single", tmp_path / "whole", LAST).strategy.full_model_state()
    shares = on_ranks(write, tmp_path)
    for (reader, writer), end in on_ranks(read, tmp_path, tmp_path / "ends").items():
        assert end.keys() == expected.keys()
        for name, value in expected.items():
            assert (end[name] - value).abs().max() < 1e-12, f"{name} of {reader}, read from {writer}"
    # a rank holds its part of the experts, and no more than that
    parts = {layout: 2 / 4 if "pp" in layout else 1 / processes for layout, (processes, _) in LAYOUTS.items()}
    for layout, found in shares.items():
        assert all(math.isclose(share, parts[layout]) for share in found), (layout, found)


# --- balance ---------------------------------------------------------------------------------------------------------


def balanced(folder: str, strategy: Any) -> tuple[list[Tensor], list[Any]]:
    """Return the selection biases after a training with 5 samples in its last step, and what was logged."""
    seed_everything(2, verbose=False)
    module, logger = Mixture(), RecordingLogger(folder)
    fit(module, ExpertBalance(0.05), strategy=strategy(), logger=logger, log_every_n_steps=1)
    biases = [block.experts.selection_bias.clone() for block in module.blocks]  # type: ignore[union-attr, operator]
    return biases, [logger.series(name) for name in ("experts/imbalance", "experts/unused")]


def balanced_on_ranks(folder: str) -> list[tuple[list[Tensor], list[Any]]]:
    layouts = ({"dp_shard": 4, "ep": 2}, {"pp": 2, "dp_shard": 2, "ep": 2})
    return [balanced(folder, partial(ParallelStrategy, **degrees)) for degrees in layouts]


def test_biases_follow_the_tokens_of_all_ranks_and_micro_batches(tmp_path: Path) -> None:
    biases, logged = balanced(str(tmp_path), lambda: "single")
    for rank, ends in enumerate(run_ranks(balanced_on_ranks, 4, str(tmp_path))):
        for own, also_logged in ends:
            torch.testing.assert_close(own, biases, rtol=0, atol=1e-15)
            assert rank or also_logged == logged
    # all tokens chose the first two of four experts in each of five steps
    torch.testing.assert_close(biases[1], torch.tensor([1.75, 1.75, 0.25, 0.25]).double())
    assert [value for _, value in logged[0]] == [2.0] * LAST
    assert all(value >= 2 for _, value in logged[1])


# --- mistakes that only a step shows ---------------------------------------------------------------------------------


def wrong(layer: Any, num_experts: int) -> str:
    """Return the error of a step, in which the other rank may wait: it waits no longer than this one lives."""
    with pytest.raises(ModuleError) as caught:
        fit(Wrong(layer(), num_experts), strategy=ParallelStrategy(dp_shard=2, ep=2))
    return str(caught.value)


class RankRouter(nn.Module):
    """Experts whose router shifts its choice by the rank, as one with a bias that ranks update alone does."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts(6, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        rank = torch.distributed.get_rank()
        self.experts.selection_bias.copy_(torch.arange(4) == rank)
        out: Tensor = x + self.experts(x)
        return out


class NoisyRouter(Experts):
    """A router that draws random numbers, which ranks do."""

    def forward(self, x: Tensor) -> Any:
        self.selection_bias.copy_(torch.rand(4))
        return super().forward(x)


class Routed(Mixture):
    """A mixture around one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([layer])


def chosen_by_rank() -> str:
    with pytest.raises(ModuleError) as caught:
        fit(Routed(RankRouter()), strategy=ParallelStrategy(dp_shard=2, ep=2))
    fit(Routed(NoisyRouter(6, 4, 4)), strategy=ParallelStrategy(dp_shard=2, ep=2), max_steps=1)  # is not compared
    return str(caught.value)


def test_a_router_whose_choice_depends_on_the_rank_is_named_in_the_first_step() -> None:
    for message in run_ranks(chosen_by_rank, 2):
        assert "blocks.0.experts chooses other experts for the same tokens on rank 1 of ep than on rank 0" in message


def compiled() -> str:
    with pytest.raises(ConfigError) as caught:
        fit(Mixture(), strategy=ParallelStrategy(dp_shard=2, ep=2), compile=True)
    return str(caught.value)


def test_a_compiled_module_is_refused_by_name() -> None:
    assert all("but blocks.0 is compiled; leave compile out" in message for message in run_ranks(compiled, 2))


@pytest.mark.parametrize(
    ("layer", "num_experts", "part"),
    [
        (Mean, 4, "returns something else for a token with two experts than the sum"),
        (lambda: Experts(6, 4, 4).stack, 5, "got the expert 4 for a token, but has experts 0 to 3"),
    ],
)
def test_experts_that_cannot_be_called_one_by_one_are_named(layer: Any, num_experts: int, part: str) -> None:
    assert all(part in message for message in run_ranks(wrong, 2, layer, num_experts))
