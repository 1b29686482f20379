"""One process runs the stages of a module one after another, and says what cannot be cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon import ConfigError, ModuleError, TrainModule
from echelon.strategies.pipeline.draws import Draws
from echelon.strategies.pipeline.partition import find_parts, make_partition
from echelon.strategies.pipeline.spec import KnownShapes, Shapes, signature_of, specs_of
from echelon.strategies.pipeline.stages import StagedModule, has_nan


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor, added: Tensor | float = 0.0) -> Tensor:
        out: Tensor = x + self.drop(self.layer(x)).tanh() + added
        return out


class Model(nn.Module):
    """A table, four blocks around a module without parameters, its own parameter, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.bias = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.act = nn.ReLU()
        self.head = nn.Linear(4, 4)
        self.logged: list[tuple[str, float]] = []

    def log(self, name: str, value: Tensor) -> None:
        self.logged.append((name, value.item()))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.act(block(x))
        return x

    def step(self, tokens: Tensor) -> Any:
        noise = torch.rand(())
        x = self.table(tokens) + self.bias
        self.log("table", x.mean())
        self.log("body", (x := self.body(x) * (1 + noise)).mean())  # asks for log before the value is there
        return nn.functional.cross_entropy(self.head(x), tokens % 4)


TOKENS = torch.arange(8)


def in_stages(module: Any, number: int = 2, step: Any = None, index: int = 0) -> Any:
    """Run a step through all stages in this process; return what the last one returns."""
    staged = StagedModule(module, make_partition(module, number), range(number), torch.device("cpu"))
    staged.is_first_look = True
    staged.draws.begin(0)
    received, shapes, output = None, Shapes(None, {}), None
    for stage in range(number):
        with staged.passing(stage, index, received, shapes) as current:
            output = staged.run(step or module.step, TOKENS)
        received, shapes = output, Shapes(specs_of(output), current.noted())
    return output


def test_parts_are_blocks_and_the_largest_modules_around_none() -> None:
    assert list(find_parts(Model())) == ["table", *(f"blocks.{n}" for n in range(4)), "head"]
    partition = make_partition(Model(), 2)
    assert partition.stages == (("table", "blocks.0", "blocks.1"), ("blocks.2", "blocks.3", "head"))
    assert partition.everywhere == ("bias",)
    assert [partition.boundary(stage) for stage in range(2)] == ["blocks.1", "blocks.3"]


class Decoder(nn.Module):
    """Registers a norm after the layers that it precedes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(8, 4), nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.last_norm, self.first_norm = nn.LayerNorm(4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        if self.last_norm is None:
            return x
        hidden = self.layers[0](self.first_norm(self.embed(x)))
        for layer in self.layers[1:]:
            hidden = layer(hidden)
        return self.last_norm(hidden)

    def embed(self, x: Tensor) -> Tensor:
        return self.table(x) + self.positions(x)


class HeadFirst(TrainModule):
    """Registers a head before its body, and calls both in a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body, self.other = nn.Linear(4, 8), Decoder(), nn.Linear(4, 1)

    def training_step(self, batch: Tensor) -> Tensor:
        self.log("mean", batch.mean())
        return self(batch).square().mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class BodiesInAnyOrder(HeadFirst):
    """Calls a body before the one that is registered before it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Decoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x) + self.body(x))


def test_parts_are_in_the_order_in_which_the_code_calls_them_and_else_as_registered() -> None:
    names = ["table", "positions", "first_norm", "layers.0", "layers.1", "last_norm"]
    body = [f"body.{name}" for name in names]
    # what is never called by its name stays behind the one that is registered before it
    assert list(find_parts(HeadFirst())) == [*body, "other", "head"]
    # blocks stay in the order of registration, and with them all that is beside them
    encoder = [f"encoder.{name}" for name in names]
    assert list(find_parts(BodiesInAnyOrder())) == ["head", *body, "other", *encoder]


@pytest.mark.parametrize("number", [2, 3, 4])
def test_stages_compute_what_the_whole_step_does_and_log_each_value_once(number: int) -> None:
    module = Model().eval()
    torch.manual_seed(3)
    expected, logged = module.step(TOKENS), module.logged
    after = torch.rand(())
    module.logged = []
    torch.manual_seed(3)
    assert torch.equal(in_stages(module, number), expected)
    assert module.logged == logged
    torch.manual_seed(3)
    torch.rand(())
    assert torch.equal(torch.rand(()), after)


def test_parts_draw_from_streams_of_their_own() -> None:
    draws = Draws(torch.device("cpu"))
    torch.manual_seed(1)
    expected = [torch.rand(()) for _ in range(3)]

    def micro_batch(index: int, stage: int) -> tuple[Tensor, Tensor, Tensor]:
        draws.begin_micro_batch(index)
        own = torch.rand(())
        with draws.of_part(index, "block"):
            dropped = torch.rand(())
        draws.cross(index, stage)
        return own, dropped, torch.rand(())

    torch.manual_seed(1)
    draws.begin(7)
    first, other_stage, second = micro_batch(0, 0), micro_batch(0, 1), micro_batch(1, 0)
    draws.end(2)
    assert first[0] == other_stage[0] == expected[0]
    assert second[0] == expected[1]
    assert torch.rand(()) == expected[2]
    assert first[2] != other_stage[2]
    assert len({float(number) for number in (*first, *second)}) == 6


def twice(module: Model, tokens: Tensor) -> Tensor:
    module.step(tokens)
    return module.step(tokens)


def residual(module: Model, tokens: Tensor) -> Tensor:
    x = module.table(tokens)
    for block in module.blocks:
        x = x + block(x)
    return module.head(x).sum()


def beside(module: Model, tokens: Tensor) -> Tensor:
    x = memory = module.table(tokens)
    for block in module.blocks:
        x = block(x, added=memory)
    return module.head(x).sum()


def again(module: Model, tokens: Tensor) -> Tensor:
    x = module.table(tokens)
    for block in (*module.blocks[:1], *module.blocks):
        x = block(x)
    return module.head(x).sum()


def backwards(module: Model, tokens: Tensor) -> Tensor:
    x = module.table(tokens)
    for at in (1, 0, 2, 3):
        x = module.blocks[at](x)
    return module.head(x).sum()


def skipping(module: Model, tokens: Tensor) -> Tensor:
    x = module.blocks[0](module.table(tokens))
    return module.head(module.blocks[3](module.blocks[2](x))).sum()


def ending_early(module: Model, tokens: Tensor) -> Tensor:
    return module.blocks[1](module.blocks[0](module.table(tokens))).sum()


def head_first(module: Model, tokens: Tensor) -> Tensor:
    return module.body(module.head(module.table(tokens))).sum()


def table_last(module: Model, tokens: Tensor) -> Tensor:
    x = module.blocks[1](module.blocks[0](torch.ones(8, 4)))
    x = module.blocks[3](module.blocks[2](x))
    return (module.head(x) + module.table(tokens).mean()).sum()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (twice, r"table was called 2 times on stage 1, but 1 times .* call the model once"),
        (residual, r"blocks.2 \(Block\) on stage 1 got NaN in .*from one of table, blocks.0"),
        (beside, r"blocks.2 \(Block\) on stage 1 got NaN in \['kwargs'\]\['added'\]"),
        (again, r"blocks.0 was called twice"),
        (backwards, r"blocks.1 was called before blocks.0"),
        (skipping, r"blocks.2, which is on stage 1, was called before blocks.1 on stage 0"),
        (ending_early, r"The step must call blocks.2 of stage 1, but it ended on stage 0"),
        (head_first, r"head, which is on stage 1, was called before blocks.1 on stage 0"),
        (table_last, r"table was called after blocks.1, on stage 1, but is on stage 0"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_step_that_cannot_be_cut_is_named(step: Any, message: str) -> None:
    module = Model().eval()
    with pytest.raises(ModuleError, match=message):
        in_stages(module, step=lambda tokens: step(module, tokens))
    assert "log" not in vars(module)


def test_a_block_that_returns_no_tensors_is_named() -> None:
    module = Model()
    module.blocks[1].forward = lambda x: {"kind": object()}
    with pytest.raises(ModuleError, match=r"blocks.1, the last part of stage 0, must return tensors"):
        in_stages(module)


def test_a_checkpoint_that_hides_the_gradients_of_what_is_sent_is_named() -> None:
    module = Model()

    def step(tokens: Tensor) -> Tensor:
        x = module.table(tokens)
        for block in module.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return module.head(x).sum()

    with pytest.raises(ModuleError, match=r"blocks.1 was called by torch.utils.checkpoint with use_reentrant=True"):
        in_stages(module, step=step)


def test_containers_are_no_parts_but_what_they_hold() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    module = nn.Module()
    module.stem = nn.ModuleList([nn.Embedding(8, 4), nn.LayerNorm(4)])
    module.prompts, module.holder = nn.ParameterList([torch.ones(4)]), Holder()
    module.layers = nn.ModuleDict({"0": Block(), "1": Block()})
    module.heads = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 2)})
    partition = make_partition(module, 2)
    assert partition.stages == (
        ("stem.0", "stem.1", "holder.inner", "layers.0"),
        ("layers.1", "heads.a", "heads.b"),
    )
    assert partition.everywhere == ("prompts.0", "holder.scale")


def test_a_block_may_return_a_structure() -> None:
    module = Model().eval()
    expected = module.step(TOKENS)
    plain = [block.forward for block in module.blocks]

    def run(step: int) -> Any:
        return lambda x: (plain[step](x), None, {"extra": torch.ones(2)})

    for at, block in enumerate(module.blocks):
        block.forward = run(at)

    def body(x: Tensor) -> Tensor:
        for block in module.blocks:
            x = module.act(block(x)[0])
        return x

    module.body = body  # type: ignore[method-assign]
    torch.manual_seed(0)
    expected = module.step(TOKENS)
    torch.manual_seed(0)
    assert torch.equal(in_stages(module), expected)


class Counting(nn.Module):
    """A block that passes on which of its inputs count, and how many blocks there were."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, mask, number = inputs
        return x + self.layer(x) * mask, mask, number + 1


@pytest.mark.parametrize("number", [2, 4])
def test_blocks_may_pass_on_whole_numbers(number: int) -> None:
    module = Model().eval()
    module.blocks = nn.ModuleList(Counting() for _ in range(4))

    def step(tokens: Tensor) -> Tensor:
        x, mask, number = module.table(tokens), (tokens > 2).unsqueeze(-1), torch.zeros((), dtype=torch.int64)
        for block in module.blocks:
            assert number.shape == ()
            x, mask, number = block((x, mask, number))
        return module.head(x * mask).sum() * number

    assert torch.equal(in_stages(module, number, step), step(TOKENS))


def test_whole_numbers_that_an_earlier_stage_has_are_named_where_they_are_used() -> None:
    module = Model().eval()
    module.blocks = nn.ModuleList(Counting() for _ in range(4))

    def step(tokens: Tensor) -> Tensor:
        x, mask, number = module.blocks[0]((module.table(tokens), tokens[:, None] > 2, torch.ones(())))
        kept = mask
        for block in module.blocks[1:]:
            x, mask, number = block((x, mask, number))
        return (module.head(x) * kept).sum()

    with pytest.raises(
        ModuleError, match=r"blocks.0 on stage 0 returns a tensor of torch.bool, which the step uses on"
    ):
        in_stages(module, step=step)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([["table"]], r"must return 2 lists of names"),
        ([["table", "blocks.0"], ["blocks.7", "head"]], r"names 'blocks.7', which is not a part of the module"),
        ([["table", "blocks"], []], r"names no parts for one of the stages"),
        ([["table"], ["blocks"]], r"assigns no stage to head"),
    ],
)
def test_wrong_names_of_stages_are_refused(given: Any, message: str) -> None:
    module: Any = Model()
    module.configure_pipeline = lambda number: given
    with pytest.raises(ConfigError, match=message):
        make_partition(module, 2)


def test_fewer_blocks_than_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Model has 4 repeated blocks for 5 stages .*configure_pipeline"):
        make_partition(Model(), 5)


def test_known_shapes_are_those_used_last() -> None:
    known = KnownShapes()
    for length in range(600):
        known.of(signature_of("training_step", (torch.empty(length), "text", 3)))[0] = Shapes(None, {})
    assert len(known) == 512
    assert known.of(signature_of("training_step", (torch.empty(599), "other text", 3)))
    assert not known.of(signature_of("training_step", (torch.empty(599), "text", 4)))
    assert has_nan({"x": torch.tensor([0.0, float("nan")])})
    assert not has_nan((torch.ones(2), torch.ones(2, dtype=torch.int64), None))
