"""A module's `optimizer_step` runs around the last forward of each step, whose gradient is the mean over all samples.

Tried as well: closures called twice on ranks, those of a pipeline, an update left out with scaled losses, and an epoch
that a hook ends inside a window.
"""

from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from as_rank import calm_down
from small import Regression, loader, quiet, raises
from sweep import dealt
from test_early_end import DATA, RATE, STRATEGIES, Net, Own, trained
from torch import Tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from echelon import ModuleError, ParallelStrategy, Strategy
from echelon.testing import run_ranks


class Sets(Net):
    """Sets in `optimizer_step` by what the last micro-batch of the step multiplies its loss."""

    def __init__(self, *, leaves_at: int, calls_twice: bool = False) -> None:
        super().__init__(leaves_at=leaves_at)
        self.calls_twice = calls_twice
        self.register_buffer("factor", torch.ones((), dtype=torch.float64))
        self.notes: list[str] = []
        self.weighed = dict[int, list[tuple[list[float], float]]]()
        """The samples of this rank in each step, and by what their loss was multiplied."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.notes.append("forward")
        rows = [(row, float(self.factor)) for row in batch.tolist()]
        if self.is_again:
            del self.weighed[self.global_step]
            self.is_again = False
        self.weighed.setdefault(self.global_step, []).extend(rows)
        return self.errors(batch).mean() * self.factor

    is_again = False

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.notes.append(f"step {epoch} {batch_idx}")
        self.factor += 0.1
        if self.calls_twice:
            first = optimizer_closure().item()
            self.is_again = True
            assert self.global_step % 2 or first  # of all samples
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.notes.append("stepped")
        self.factor -= 0.1


RUNS = {
    "whole windows": (DATA[:36], -1),
    "one rank has fewer": (DATA[:17], -1),
    "one rank has none": (DATA[:13], -1),
    "ends early": (Own(20, 8), 4),
}


def train(strategy: Strategy | str, data: Any, leaves_at: int, *, calls_twice: bool = False) -> dict[str, Any]:
    module = Sets(leaves_at=leaves_at, calls_twice=calls_twice)
    trainer = trained(module, strategy, data)
    return {
        "state": trainer.strategy.ranks.all.broadcast(trainer.strategy.full_model_state()),
        "weighed": trainer.strategy.all_gather_object(module.weighed),
        "notes": module.notes,
        "counts": (trainer.global_step, trainer.samples_seen),
    }


def train_all(strategies: dict[str, Strategy | str], cases: list[tuple[str, str]]) -> dict[str, Any]:
    calm_down()
    ends = {}
    for name, run in cases:
        is_twice = run == "twice"
        ends[f"{name}, {run}"] = train(
            strategies[name], *RUNS["whole windows" if is_twice else run], calls_twice=is_twice
        )
    return ends


def check(end: dict[str, Any]) -> None:
    """Check that each step is the mean over all ranks, and that their last micro-batches saw what the step had set."""
    steps = sorted(set(chain.from_iterable(end["weighed"])))
    module, number = Net(leaves_at=-1), 0
    for step in steps:
        rows = list(chain.from_iterable(weighed.get(step, ()) for weighed in end["weighed"]))
        number += len(rows)
        factors = torch.tensor([factor for _, factor in rows], dtype=torch.float64)
        module.zero_grad()
        samples = torch.tensor([row for row, _ in rows], dtype=torch.float64)
        (module.errors(samples) * factors).mean().backward()
        with torch.no_grad():
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter -= RATE * parameter.grad
    assert end["counts"] == (len(steps), number)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(end["state"][name], value, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def ends() -> list[dict[str, Any]]:
    return run_ranks(partial(train_all, STRATEGIES, CASES), 2)


CASES = dealt([*STRATEGIES], [*RUNS, "twice"], [0, 3])


@pytest.mark.sweep
@pytest.mark.parametrize(("strategy", "run"), CASES)
def test_what_optimizer_step_sets_is_seen_by_the_forward_of_that_step(ends, strategy, run):
    for found in ends:
        end = found[f"{strategy}, {run}"]
        check(end)
        last = {step: rows[-1][1] for weighed in end["weighed"] for step, rows in weighed.items()}
        assert run == "ends early" or set(last.values()) == {1.1}
    notes = [found[f"{strategy}, {run}"]["notes"] for found in ends]
    steps = [[note for note in each if note.startswith("step ")] for each in notes]
    assert steps[0] == steps[1]
    if run == "whole windows":
        assert notes[0][:5] == ["forward", "forward", "step 0 2", "forward", "stepped"]
        assert steps[0] == [f"step {epoch} {batch_idx}" for epoch in (0, 1) for batch_idx in (2, 5, 8)]


CUT = {"blocks.0": ColwiseParallel(), "blocks.1": RowwiseParallel()}


def train_with_parts() -> dict[str, Any]:
    pipeline = ParallelStrategy(pp=2, dp_shard=2)
    cases = dealt(["tp", "pp"], [*RUNS], [1])
    ends = train_all({"tp": ParallelStrategy(tp=2, dp_shard=2, tp_plan=CUT), "pp": pipeline}, cases)
    with pytest.raises(ModuleError, match="called optimizer_closure twice in global_step 0, but a pipeline"):
        train(pipeline, *RUNS["whole windows"], calls_twice=True)
    return ends


@pytest.mark.sweep
def test_so_it_is_with_layers_that_are_cut_and_in_a_pipeline():
    for found in run_ranks(train_with_parts, 4):
        for end in found.values():
            check(end)


class Leaves(Regression):
    """Computes the loss in every step, small enough to be scaled, and updates in every second one."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / 64

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


def test_an_update_may_be_left_out_also_with_scaled_losses():
    plain, scaled = Leaves(), Leaves()
    scaled.load_state_dict(plain.state_dict())
    for module, precision in ((plain, "32-true"), (scaled, "16-mixed")):
        trainer = quiet(max_epochs=1, precision=precision)
        trainer.fit(module, loader())
        assert (trainer.global_step, trainer.counters.optimizer_steps) == (4, [2])
    torch.testing.assert_close(scaled.net.weight, plain.net.weight, rtol=1e-2, atol=1e-3)


def test_an_override_that_calls_nothing_is_an_error():
    class Skips(Regression):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer.step()

    with raises(ModuleError, "Skips.optimizer_step did not call optimizer_closure in batch 0", "optimizer_closure()"):
        quiet(max_epochs=1).fit(Skips(), loader())


def test_each_of_several_optimizers_steps_with_the_gradients_of_one_forward():
    class Two(Regression):
        steps = 0

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            self.steps += 1
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

        def configure_optimizers(self):
            return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.net.parameters()]

    two, one = Two(), Regression()
    one.load_state_dict(two.state_dict())
    for module in (two, one):
        quiet(max_epochs=1).fit(module, loader())
    assert (len(two.seen), two.steps) == (4, 8)
    assert torch.equal(two.net.weight, one.net.weight)
    assert torch.equal(two.net.bias, one.net.bias)


def test_lbfgs_searches_along_clipped_gradients_and_skips_a_batch_without_loss():
    class Searches(Regression):
        def __init__(self):
            super().__init__()
            self.notes = []

        def training_step(self, batch, batch_idx):
            self.notes.append(batch_idx)
            return super().training_step(batch, batch_idx) if batch_idx else None

        def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
            self.notes.append("clip")

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)

    module = Searches()
    quiet(max_epochs=1, limit_train_batches=2).fit(module, loader())
    assert module.notes == [0, "clip", *[1, "clip"] * 2]
