"""Recomputation gives the same numbers, keeps less memory, and leaves no trace in the module."""

import copy
import inspect

import pytest
import torch
from as_rank import calm_down, double_trainer, world_size
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.data import DataLoader, TensorDataset

from echelon import ActivationCheckpointing, ConfigError, ModelCheckpoint, Trainer, TrainModule, seed_everything
from echelon.strategies import DataParallelStrategy
from echelon.strategies.fsdp import FSDPStrategy
from echelon.strategies.module import activation_offload
from echelon.strategies.module.activation_checkpointing import _selective_policy, checkpointing_activations
from echelon.strategies.module.blocks import repeated_blocks
from echelon.testing import run_ranks

WIDTH = 16


class Block(nn.Module):
    """Attention and an MLP with dropout, around a norm whose buffers change in forward."""

    def __init__(self):
        super().__init__()
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, *, scale=1.0):
        q, k, v = self.attention(x).reshape(len(x), -1, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        x = self.norm((x + attended.transpose(1, 2).flatten(2)).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(nn.functional.dropout(x, 0.1, self.training)) * scale


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.outer = nn.Linear(WIDTH, 1)
        self.kept_bytes, self.calls = [], 0

    def forward(self, x):
        x = self.inner(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.outer(x).mean(dim=1)

    def training_step(self, batch, batch_idx):
        kept = {}

        def note(tensor):
            if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.kept_bytes.append(sum(kept.values()))
        return loss

    def on_train_start(self):
        self.blocks[0].mlp[0].register_forward_hook(self._count)

    def _count(self, *_):
        self.calls += torch.is_grad_enabled()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        optimizer.zero_grad()


def by_name(name, part):
    return name.endswith((".0", ".2"))


SETTINGS = {
    "full": "full",
    "selective": "selective",
    "selective, every second product": ActivationCheckpointing(mode="selective", every_product=2),
    "every second": 2,
    "by class": ActivationCheckpointing(modules=Block),
    "by classes": ActivationCheckpointing(modules=(Block, nn.GELU), mode="selective"),
    "by predicate": ActivationCheckpointing(modules=by_name),
    "offloaded": ActivationCheckpointing(offload=True),
    "selective, offloaded": ActivationCheckpointing(mode="selective", offload=True),
    "offloaded only": ActivationCheckpointing(mode=None, offload=True),
}


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 5, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(dim=(1, 2))[:, None])


def fit(module, setting, ckpt_path=None, **settings):
    """Train six steps of four samples, with a validation in between, in this process or as a rank of a run."""
    trainer = double_trainer(activation_checkpointing=setting, **{"max_epochs": 2, **settings})
    trainer.fit(module, DataLoader(data(), 4 // world_size(), shuffle=True), DataLoader(data(), 4), ckpt_path=ckpt_path)
    return trainer


def trained(setting, kind=Net, **settings):
    seed_everything(3, verbose=False)
    module = kind()
    fit(module, setting, **settings)
    return module


def assert_same(module, expected):
    """The weights and buffers, and the gradients of the last step, are those of a run that keeps everything."""
    for (name, mine), (other, theirs) in zip(
        [*module.state_dict().items()], [*expected.state_dict().items()], strict=True
    ):
        assert name == other
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    for mine, theirs in zip(module.parameters(), expected.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def plain():
    return trained(None)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_mode_ends_like_a_run_that_keeps_everything(plain, name):
    module = trained(SETTINGS[name])
    assert_same(module, plain)
    assert not any("forward" in vars(part) for part in module.modules())


def test_less_is_kept_and_more_is_computed(plain):
    names = "full", "selective, every second product", "selective", "every second"
    kept = {name: trained(SETTINGS[name]).kept_bytes[-1] for name in names}
    assert kept["full"] < 0.1 * plain.kept_bytes[-1]
    assert kept["full"] < kept["every second"] < 0.5 * plain.kept_bytes[-1]
    assert kept["full"] <= kept["selective"] < 0.7 * plain.kept_bytes[-1]
    if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:  # else the kept ones are not seen
        assert kept["full"] < kept["selective, every second product"] < kept["selective"]
    assert (plain.calls, trained("full").calls) == (6, 12)


def test_a_later_fit_without_the_setting_keeps_everything():
    module = trained("full")
    less = module.kept_bytes[-1]
    fit(module, None)
    assert module.kept_bytes[-1] > 5 * less


def test_a_run_goes_on_with_another_setting(plain, tmp_path):
    saving = {"enable_checkpointing": True, "callbacks": ModelCheckpoint(tmp_path, save_last=True)}
    trained("full", max_epochs=1, **saving)
    module = Net()
    fit(module, "selective", ckpt_path=tmp_path / "last.ckpt")
    assert_same(module, plain)


def test_the_module_is_as_it_was_after_an_error():
    class Failing(Net):
        def on_before_zero_grad(self, optimizer):
            assert "forward" in vars(self.blocks[0])
            raise RuntimeError("enough")

    module = Failing()
    with pytest.raises(RuntimeError, match="enough"):
        fit(module, "full")
    assert "forward" not in vars(module.blocks[0])


def test_manual_optimization_and_accumulation_end_the_same(plain):
    assert_same(trained("full", Manual), trained(None, Manual))
    twice = {"accumulate_grad_batches": 2}
    assert_same(trained("selective", **twice), trained(None, **twice))


@pytest.mark.parametrize("setting", ["full", "selective"])
def test_replicas_of_one_process_end_the_same(setting):
    parts = {"strategy": DataParallelStrategy(), "devices": 2}
    assert_same(trained(setting, **parts), trained(None, **parts))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))

    def forward(self, x, *, scale=1.0):
        return x + self.mlp(x) * scale


class Compiled(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Plain() for _ in range(2))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def on_train_start(self):
        pass


def test_a_compiled_module_ends_the_same():
    compiled = {"compile": {"backend": "aot_eager"}, "max_epochs": 1, "limit_val_batches": 0}
    expected = trained(None, Compiled, **compiled)
    for setting in ("full", "selective"):
        assert_same(trained(setting, Compiled, **compiled), expected)


def test_offloading_is_refused_where_it_would_keep_the_module_from_being_compiled():
    with pytest.raises(ConfigError, match="compile=True .* offload=True"):
        Trainer(compile=True, activation_checkpointing=ActivationCheckpointing(offload=True))


# --- several processes


def of_all():
    calm_down()
    found = []
    for setting, strategy in (
        (None, "ddp"),
        ("full", "ddp"),
        ("selective", FSDPStrategy()),
        ("full", FSDPStrategy(policy=nn.Linear, reshard_after_forward=False)),
    ):
        module = trained(setting, strategy=strategy, max_epochs=1)
        state = {name: whole(value) for name, value in module.state_dict().items()}
        found.append((setting, state, module.kept_bytes[-1], module.calls))
    return found


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def test_ranks_of_ddp_and_fsdp_end_the_same():
    for rank in run_ranks(of_all, 2):
        _, expected, everything, calls = rank[0]
        for setting, state, kept, more_calls in rank:
            assert kept < everything or setting is None
            assert more_calls == (1 if setting is None else 2) * calls
            torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)


# --- which submodules


def test_blocks_are_found_where_they_repeat():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
            self.tail = nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Linear(2, 2))
            self.pairs = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])])

    names = [name for name, _ in repeated_blocks(Deep())]
    assert names == ["stages.0", "stages.1", "pairs.0.0", "pairs.0.1", "pairs.1.0", "pairs.1.1"]


def test_each_nth_part_is_taken_from_the_first_one():
    module = Net()
    assert [name for name, _ in ActivationCheckpointing(every=2).submodules(module)] == ["blocks.0", "blocks.2"]
    assert [name for name, _ in ActivationCheckpointing(every=9).submodules(module)] == ["blocks.0"]


def test_a_module_without_blocks_is_refused_with_what_was_looked_for():
    class Small(Net):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    with pytest.raises(ConfigError, match="side by side in a ModuleList or a Sequential. Name them: Act") as error:
        fit(Small(), "full")
    assert "Small, which consists of Linear, ReLU, Sequential" in str(error.value)
    with pytest.raises(ConfigError, match="it looked for modules=<class 'torch.nn.modules.conv.Conv2d'>"):
        fit(Small(), ActivationCheckpointing(modules=nn.Conv2d))


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (
            lambda: ActivationCheckpointing(mode="selectiv"),
            "or None, got 'selectiv'. Did you mean 'selective'",
        ),
        (
            lambda: ActivationCheckpointing(every_product=2),
            "every_product of .* must be an int >= 2, with mode='selective', got 2 with mode='full'; leave it out",
        ),
        (
            lambda: ActivationCheckpointing(mode="selective", every_product=1),
            "every_product of .* must be an int >= 2, .*, got 1",
        ),
        (
            lambda: ActivationCheckpointing(every=0),
            "every of .* must be an int >= 1, got 0; give 1",
        ),
        (
            lambda: ActivationCheckpointing(modules=3),
            "modules of .* must be .*, got 3; give one of these",
        ),
        (lambda: ActivationCheckpointing(mode=None), r"mode=None, offload=False\) does nothing"),
        (
            lambda: Trainer(activation_checkpointing=0),
            "every of .* must be an int >= 1, got 0; give 1",
        ),
        (lambda: Trainer(activation_checkpointing=True), "activation_checkpointing=True has the wrong type bool"),
        (lambda: Trainer(activation_checkpointing="half"), "activation_checkpointing='half' has the wrong type"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(make, found):
    with pytest.raises(ConfigError, match=found):
        make()


@pytest.mark.parametrize(
    ("operator", "args", "is_kept"),
    [
        (torch.ops.aten.addmm.default, (), True),
        (torch.ops.aten.convolution.default, (), True),
        (torch.ops.aten.gelu.default, (), False),
        (torch.ops._c10d_functional.all_reduce.default, (), True),
        (torch.ops._c10d_functional.wait_tensor.default, (), True),
        (torch.ops.aten._scaled_dot_product_flash_attention.default, ("q", "k", "v"), True),
        (torch.ops.aten._scaled_dot_product_flash_attention.default, ("q", "k", "v", 0.1), False),
        (torch.ops.aten._scaled_dot_product_efficient_attention.default, ("q", "k", "v", None, True, 0.1), False),
    ],
)
def test_selective_keeps_what_is_dear_and_draws_no_random_numbers(operator, args, is_kept):
    assert (_selective_policy(None, operator, *args) is CheckpointPolicy.MUST_SAVE) == is_kept


# --- details


class Counting(nn.Module):
    """Depends on a buffer that it changes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x):
        self.factor.mul_(1.5)
        return torch.tanh(self.layer(x) * self.factor.clone())


def test_a_part_is_computed_again_with_the_buffers_of_its_first_time():
    def gradients(setting):
        torch.manual_seed(0)
        net = nn.Sequential(Counting(), Counting()).double()
        with checkpointing_activations(net, setting):
            for _ in range(3):
                loss = net(torch.ones(2, 4, dtype=torch.float64)).sum()
                loss.backward(retain_graph=True)
                loss.backward()
        return [*(p.grad for p in net.parameters()), *net.buffers()]

    torch.testing.assert_close(gradients(ActivationCheckpointing()), gradients(None), rtol=0, atol=1e-12)


def test_a_forward_of_an_instance_is_called_and_put_back():
    net = nn.Sequential(Block(), Block())
    net[0].forward = lambda x: x * 2
    mine = net[0].forward
    with checkpointing_activations(net, ActivationCheckpointing()):
        assert torch.equal(net[0](torch.ones(1, requires_grad=True)), torch.full((1,), 2.0))
    assert vars(net[0])["forward"] is mine
    assert "forward" not in vars(net[1])


def test_a_block_that_is_used_twice_is_computed_again_twice_in_mixed_precision():
    def gradients(setting):
        torch.manual_seed(0)
        net = nn.Sequential(Plain(), Plain())
        with checkpointing_activations(net, setting), torch.autocast("cpu", torch.bfloat16):
            loss = net(net(torch.ones(2, WIDTH))).float().sum()
        loss.backward()
        return [p.grad for p in net.parameters()]

    torch.testing.assert_close(gradients(ActivationCheckpointing()), gradients(None), rtol=0, atol=0)
    # without autocast's cache a weight is cast for each use, and its gradients are added in float32
    selective = gradients(ActivationCheckpointing(mode="selective"))
    torch.testing.assert_close(selective, gradients(None), rtol=2e-2, atol=2e-2)


def test_a_block_in_two_lists_is_one_part():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.ModuleList([Plain(), Plain()])
            self.second = nn.ModuleList(self.first)

    module, setting = Shared(), ActivationCheckpointing()
    assert [name for name, _ in setting.submodules(module)] == ["first.0", "first.1"]
    with checkpointing_activations(module, setting):
        copied = copy.deepcopy(module)
        assert vars(copied.first[0])["forward"].__self__ is copied.first[0]
    assert "forward" not in vars(module.first[0])


def with_a_cache(kind):
    """Return a small model of transformers, which by default caches keys and values in training as well."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    of_llama = {"intermediate_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": None}
    configs = {
        "llama, eager": lambda: transformers.LlamaConfig(**sizes, **of_llama, attn_implementation="eager"),
        "gemma 2": lambda: transformers.Gemma2Config(**sizes, **of_llama, head_dim=4, attn_implementation="eager"),
        "mistral, a window of 3": lambda: transformers.MistralConfig(**sizes, **of_llama, sliding_window=3),
        "gpt2, eager": lambda: transformers.GPT2Config(
            vocab_size=12, n_embd=16, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2, attn_implementation="eager"
        ),
    }
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(configs[kind]()).double().eval()


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("kind", ["llama, eager", "gemma 2", "mistral, a window of 3", "gpt2, eager"])
def test_a_second_forward_does_not_see_what_the_first_has_cached(kind, mode):
    model, tokens = with_a_cache(kind), torch.arange(16).view(2, 8) % 12

    def gradients(setting):
        model.zero_grad()
        with checkpointing_activations(model, setting):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    torch.testing.assert_close(gradients(ActivationCheckpointing(mode=mode)), gradients(None), rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offloading_frees_the_memory_of_a_gpu(monkeypatch):
    monkeypatch.setattr(
        activation_offload, "_IN_FLIGHT", 0
    )  # of 256 MB on their way nothing of this net would be freed

    def kept(setting):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))).cuda()
        before = torch.cuda.memory_allocated()
        with checkpointing_activations(net, setting):
            loss = net(torch.randn(4096, 64, device="cuda")).sum()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        return held, [p.grad for p in net.parameters()]

    everything, expected = kept(None)
    moves_all = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters  # from torch 2.14 on
    for mode in ("full", "selective", None) if moves_all else ("full", None):
        held, gradients = kept(ActivationCheckpointing(mode=mode, offload=True))
        assert held < 0.2 * everything
        torch.testing.assert_close(gradients, expected)
