"""Names, launching, checkpoints, precisions and parts on an accelerator are as on the CPU."""

import device_training as training
import pytest


def test_auto_takes_what_torch_reports_and_errors_say_what_is_here(simulated):
    taken, said, available, _ = simulated.call(training.names)
    assert taken == {"auto": "sim", "cpu": "cpu", "sim": "sim"}
    assert available == ["sim"]
    assert "finds no such device on this machine; use accelerator='sim' or 'cpu'" in said["xpu"]
    assert "not a known accelerator" in said["sym"]
    assert "sim (4 device(s))" in said["sym"]


def test_parameters_stay_the_same_objects_or_at_least_tied_when_they_move(elsewhere):
    found = elsewhere.call(training.moves)
    assert found == dict.fromkeys(found, True)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_fit_starts_processes_with_a_device_each(elsewhere, strategy):
    assert elsewhere.call(training.launched, strategy) <= 1e-12


def test_metric_objects_of_a_module_accumulate_on_the_device(elsewhere):
    found = elsewhere.call(training.metric_objects, ("ddp", "zero", "fsdp"))
    assert max(found.values()) <= 1e-12, found


def test_a_run_goes_on_from_the_device_on_the_cpu_and_back(elsewhere, tmp_path):
    found = elsewhere.call(training.checkpoints, str(tmp_path))
    assert len(found) == 3
    assert all(far <= 1e-12 for far in found.values()), found


def test_a_run_goes_on_in_another_layout_elsewhere(elsewhere, tmp_path):
    found = elsewhere.call(training.layouts, str(tmp_path))
    assert len(found) == 2
    assert all(far <= 1e-12 for far in found.values()), found


def test_a_resumed_run_draws_what_it_would_have_drawn_on_its_device(elsewhere, tmp_path):
    from_whole, from_none = elsewhere.call(training.resumed_with_dropout, str(tmp_path))
    assert from_whole <= 1e-12
    assert from_none > 1e-3


def test_each_precision_computes_as_on_the_cpu(elsewhere):
    found = elsewhere.call(training.precisions)
    bounds = {"32-true": 1e-6, "bf16-mixed": 1e-3, "16-mixed": 5e-3, "bf16-true": 1e-2}
    assert {name: far for name, far in found.items() if not far <= bounds[name]} == {}


def test_a_precision_that_the_device_does_not_autocast_to_is_refused_by_name(simulated):
    said = simulated.call(training.refused_precision)
    assert "precision='16-mixed' autocasts to float16, but accelerator='sim' autocasts to bfloat16 only" in said


@pytest.mark.parametrize("order", ["late", "early"])
def test_parts_that_copy_to_the_host_or_from_it_change_nothing(elsewhere, order):
    found = elsewhere.call(training.parts, order)
    assert {name: far for name, far in found.items() if not far <= 1e-12} == {}


@pytest.mark.parametrize("order", ["late", "early"])
def test_what_is_saved_while_training_goes_on_is_of_its_step(elsewhere, tmp_path, order):
    found = elsewhere.call(training.saved_while_training, str(tmp_path), order)
    assert found == [0.0] * 6


def test_replicas_of_recurrent_layers_compute_on_their_own_device(simulated):
    weights, buffers = simulated.call(training.replicas)
    assert weights <= 1e-12
    assert buffers <= 1e-12


def test_predictions_come_as_from_the_cpu(elsewhere):
    far, types = elsewhere.call(training.predictions)
    assert far <= 1e-12
    assert "cpu" in types


def test_logs_that_an_accelerator_waits_for_are_named_and_rarer_ones_wait_less(simulated, tmp_path):
    found = simulated.call(training.advice_of_logs, str(tmp_path))
    (often, waits), (seldom, fewer) = found[1], found[50]
    assert "logs" in often
    assert "logs" not in seldom
    assert waits - fewer > 50  # one for each step that is not logged
