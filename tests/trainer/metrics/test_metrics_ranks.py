"""Values that several ranks log become one, the same on each, whatever each has logged and in whichever order."""

import math
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from echelon.common.errors import EchelonError
from echelon.strategies.cluster.launchers import detect_environment
from echelon.strategies.distributed.process_group import ProcessGroup
from echelon.strategies.distributed.ranks import Ranks
from echelon.testing import run_ranks
from echelon.trainer.metrics.metrics import Metrics

needs_torchmetrics = pytest.mark.skipif(find_spec("torchmetrics") is None, reason="torchmetrics is not installed")
DEFAULTS = {
    "on_step": None,
    "on_epoch": None,
    "reduce_fx": "mean",
    "prog_bar": False,
    "logger": True,
    "sync_dist": True,
    "add_dataloader_idx": True,
    "rank_zero_only": False,
    "enable_graph": False,
}


def joined():
    """Join the group of all ranks; return the ranks and collectives, which are all of a strategy that metrics ask."""
    group = ProcessGroup(detect_environment(), torch.device("cpu"))
    group.join()
    ranks = Ranks.of(group.environment, group, torch.device("cpu"))
    return SimpleNamespace(
        ranks=ranks,
        rank=group.rank,
        data_rank=group.rank,
        data_size=group.world_size,
        world_size=group.world_size,
        has_loss=True,
    )


def log(metrics, name, value, batch_size=1, **options):
    metrics.log(name, value, tuple({**DEFAULTS, **options}.values()), batch_size)


def ended(metrics):
    """The values of an epoch that ends here."""
    return {line.reported: value for line, value in metrics.end_batches()}


def plain(values):
    return {name: value.item() for name, value in values.items()}


def evaluate(metrics, logs):
    """Run an evaluation in which `logs(metrics)` is all that this rank does; return what was reported."""
    before = metrics.enter("validate")
    metrics.clear_stage()
    metrics.in_batch = True
    logs(metrics)
    metrics.in_batch = False
    values = plain(ended(metrics))
    metrics.clear_stage()
    metrics.enter(before)
    return values


def _called(names):
    """Call each function of this module once, in a group that is joined once; return results, and errors as text."""
    ranks, results = joined(), {}
    for name in names:
        try:
            results[name] = globals()[name](ranks)
        except EchelonError as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results


@pytest.fixture(scope="module")
def of_two():
    return on_ranks(2, TWO)


@pytest.fixture(scope="module")
def of_three():
    return on_ranks(3, THREE)


def on_ranks(world_size, functions):
    """Return what the functions return on real ranks: the same on each, or their test fails."""
    of_ranks = run_ranks(_called, world_size, [function.__name__ for function in functions])
    # compared as text, to the last bit; NaN is NaN
    alike = {name: len({repr(of_rank[name]) for of_rank in of_ranks}) == 1 for name in of_ranks[0]}
    return {name: value if alike[name] else of_ranks for name, value in of_ranks[0].items()}


# --- who logged what ---


def uneven(ranks):
    """5 samples in batches of 4, dealt to 3 ranks: 4, 1 and none."""
    metrics, samples = Metrics(ranks), [[0.0, 1.0, 2.0, 3.0], [4.0], []][ranks.rank]

    def logs(metrics):
        if samples:
            log(metrics, "mean", sum(samples) / len(samples), len(samples))
            log(metrics, "sum", sum(samples), len(samples), reduce_fx="sum")
            log(metrics, "min", min(samples), reduce_fx="min")
            log(metrics, "max", max(samples), reduce_fx="max", prog_bar=True)
            log(metrics, "constant", 0.1, len(samples))
            for sample in samples:
                log(metrics, "median", sample, reduce_fx=lambda values: values.median() + 0.5)

    first, second = (evaluate(metrics, logs) for _ in range(2))
    assert first == second
    return first, plain(metrics.callback_metrics()), metrics.progress_bar()


def test_a_rank_without_a_batch_has_the_values_of_all_samples(of_three):
    values, read, in_bar = of_three["uneven"]
    assert values == {"mean": 2.0, "sum": 10.0, "min": 0.0, "max": 4.0, "constant": pytest.approx(0.1), "median": 2.5}
    assert read == pytest.approx(values)
    assert in_bar == {"max": 4.0}


def differently(ranks):
    metrics, rank = Metrics(ranks), ranks.rank
    rounds = [
        evaluate(metrics, lambda metrics, names=names: [log(metrics, name, rank + 1.0) for name in names[rank]])
        for names in (["ab", "ba"], ["b", "cab"], ["", ""], ["d", ""], ["", "dc"])
    ]
    return rounds, plain(metrics.callback_metrics()), metrics.computed_at("c")


def test_ranks_may_log_other_names_in_another_order_each_time(of_two):
    rounds, read, computed_at = of_two["differently"]
    assert rounds == [{"a": 1.5, "b": 1.5}, {"b": 1.5, "c": 2.0, "a": 2.0}, {}, {"d": 1.0}, {"c": 2.0, "d": 2.0}]
    assert read == {"a": 2.0, "b": 1.5, "c": 2.0, "d": 2.0}
    assert computed_at == 0


def exceptional(ranks):
    metrics, rank = Metrics(ranks), ranks.rank

    def logs(metrics):
        log(metrics, "nan", math.nan if rank else 1.0, reduce_fx="min")
        log(metrics, "inf", math.inf if rank else 1.0)
        log(metrics, "nothing", 1.0, 0)
        log(metrics, "flag", torch.tensor(bool(rank)))

    return evaluate(metrics, logs)


def test_values_that_are_not_finite_reach_every_rank(of_two):
    values = of_two["exceptional"]
    assert str(values) == "{'nan': nan, 'inf': inf, 'nothing': nan, 'flag': 0.5}"


def of_rank_zero(ranks):
    metrics, rank = Metrics(ranks), ranks.rank

    def logs(metrics):
        log(metrics, "everywhere", rank + 1.0, rank_zero_only=True)
        log(metrics, "own", rank + 1.0, sync_dist=False)
        if rank == 0:
            log(metrics, "only", 7.0, rank_zero_only=True)
        else:
            log(metrics, "absent", 8.0, sync_dist=False)

    values = evaluate(metrics, logs)
    own, absent = values.pop("own"), values.pop("absent", None)
    assert (own, absent) == ((1.0, None) if rank == 0 else (2.0, 8.0))
    return values


def test_the_value_of_rank_zero_may_count_for_all_and_each_may_keep_its_own(of_two):
    assert of_two["of_rank_zero"] == {"everywhere": 1.0, "only": 7.0}


def in_two_ways(ranks):
    metrics = Metrics(ranks)
    evaluate(metrics, lambda metrics: log(metrics, "x", 1.0, reduce_fx="sum" if ranks.rank else "mean"))


def test_one_name_logged_in_two_ways_is_an_error_on_every_rank(of_two):
    error = of_two["in_two_ways"]
    assert error.startswith("ModuleError: self.log('x', ...) was called on rank 1 in a different way")
    assert "reduce_fx='mean' and 'sum'; use one way" in error


# --- steps ---


def steps(ranks):
    metrics, rank = Metrics(ranks), ranks.rank
    seen = []
    for step in (1, 2, 3):
        metrics.position, metrics.in_batch = step, True
        if step != 2 or rank == 0:  # in the second step the other rank has no micro-batch
            log(metrics, "x", float(rank + step), 1 + rank)
            log(metrics, "hidden", float(rank), logger=False, prog_bar=True)
        metrics.in_batch = False
        if step == 1:
            assert plain(metrics.callback_metrics()) == {"x": rank + 1.0, "hidden": rank}  # without communication
        if step == 3:
            seen.append(plain(metrics.step_values()))
        metrics.reduce()
        seen.append((plain(metrics.callback_metrics()), metrics.progress_bar(), metrics.computed_at("x")))
    return seen


def test_the_values_of_a_step_are_reduced_where_someone_asks_all_ranks(of_two):
    first, second, logged, third = of_two["steps"]
    assert first == ({"x": pytest.approx(5 / 3), "hidden": 0.5}, {"hidden": 0.5}, 1)
    assert second == ({"x": 2.0, "hidden": 0.0}, {"hidden": 0.0}, 2)
    assert logged == {"x": pytest.approx(11 / 3)}
    assert third == ({"x": pytest.approx(11 / 3), "hidden": 0.5}, {"hidden": 0.5}, 3)


def both(ranks):
    metrics = Metrics(ranks)
    metrics.position, metrics.in_batch = 1, True
    log(metrics, "x", 1.0 + ranks.rank, on_step=True, on_epoch=True)
    metrics.position = 2
    log(metrics, "x", 3.0 + ranks.rank, on_step=True, on_epoch=True)
    metrics.in_batch = False
    ended(metrics)
    metrics.reduce()
    return plain(metrics.callback_metrics())


def one_name_in_two_stages(ranks):
    metrics = Metrics(ranks)
    metrics.position, metrics.in_batch = 1, True
    log(metrics, "x", 1.0 + ranks.rank)
    evaluate(metrics, lambda metrics: log(metrics, "x", 10.0 + ranks.rank))
    metrics.reduce()
    return plain(metrics.callback_metrics())


def test_the_value_of_a_validation_is_newer_than_that_of_the_step_before_it(of_two):
    assert of_two["one_name_in_two_stages"] == {"x": 10.5}


def test_the_value_of_an_epoch_is_newer_than_that_of_its_last_step(of_two):
    assert of_two["both"] == {"x_step": 3.5, "x_epoch": 2.5, "x": 2.5}


# --- state ---


def saved_inside_an_epoch(ranks):
    """Log half of an epoch, save, and log the other half in a run that is resumed."""
    metrics, rank = Metrics(ranks), ranks.rank
    options = {"on_step": False, "on_epoch": True}

    def half(metrics, first):
        metrics.enter("train")
        metrics.in_batch = True
        for index in range(first + rank, first + 3, 2):
            log(metrics, "mean", float(index), **options)
            log(metrics, "max", float(index), reduce_fx="max", **options)
            log(metrics, "last", float(index), reduce_fx=lambda values: values.max(), **options)
        metrics.in_batch = False

    half(metrics, 0)
    state = metrics.state_dict()
    resumed = Metrics(ranks)
    resumed.load_state_dict(ranks.ranks.all.broadcast(state))
    half(metrics, 3)
    half(resumed, 3)
    values = plain(ended(metrics))
    assert plain(ended(resumed)) == values
    return values


def test_what_an_epoch_has_accumulated_on_all_ranks_is_saved(of_two):
    assert of_two["saved_inside_an_epoch"] == {"mean": 2.5, "max": 5.0, "last": 5.0}


# --- torchmetrics ---


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        import torchmetrics

        self.mean = torchmetrics.MeanMetric()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=3, average="micro")


def with_metric_objects(ranks):
    """The last rank has no batch, in either of two epochs; it has to take part in what torchmetrics gather."""
    module, rank = Net(), ranks.rank
    metrics = Metrics(ranks, module)
    values = []
    for epoch in range(2):

        def logs(metrics, epoch=epoch):
            if rank == ranks.world_size - 1:
                return
            module.mean.update(torch.tensor([1.0, 2.0 + epoch]))
            module.accuracy(torch.tensor([0, 1, 2]), torch.tensor([0, 1, rank]))
            log(metrics, "accuracy", module.accuracy, 3)
            log(metrics, "mean", module.mean, 2)
            log(metrics, "plain", 1.0)

        values.append(evaluate(metrics, logs))
    return values


@needs_torchmetrics
def test_metric_objects_are_computed_by_all_ranks_also_by_one_without_a_batch(of_three):
    accuracy = pytest.approx(2 / 3)
    first, second = of_three["with_metric_objects"]
    assert first == {"plain": 1.0, "accuracy": accuracy, "mean": 1.5}
    assert second == {"plain": 1.0, "accuracy": accuracy, "mean": 2.0}


class Count:
    """Accumulates by itself, as torchmetrics' metrics do."""

    def compute(self):
        return torch.tensor(1)

    def reset(self):
        pass


def outside_of_the_module(ranks):
    metrics = Metrics(ranks, nn.Linear(1, 1))
    evaluate(metrics, lambda metrics: log(metrics, "lost", Count()) if ranks.rank == 0 else None)


def test_a_metric_object_that_a_rank_cannot_find_is_an_error_on_every_rank(of_two):
    error = of_two["outside_of_the_module"]
    assert error.startswith("ModuleError: self.log('lost', metric) was not called on rank 1")
    assert "finds no such metric in Linear; assign the metric to an attribute" in error


TWO = (
    differently,
    exceptional,
    of_rank_zero,
    in_two_ways,
    steps,
    both,
    one_name_in_two_stages,
    saved_inside_an_epoch,
    outside_of_the_module,
)
THREE = (uneven, with_metric_objects) if find_spec("torchmetrics") else (uneven,)
