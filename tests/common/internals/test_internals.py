"""Each private name of Python, NumPy, torchmetrics, tqdm and others is where we look for it."""

import multiprocessing
import subprocess
import sys

import datasets
import numpy
import torchmetrics
import tqdm
from datasets.distributed import split_dataset_by_node

from echelon.common.internals import hugging_face, metric_states, numpy_generators, processes, progress_bars
from echelon.common.internals.stack_frames import find_frame


def test_frames_of_the_stack():
    def inner():
        return find_frame(0), find_frame(1)

    own, outer = inner()
    assert own.f_code is inner.__code__
    assert outer is sys._getframe()


def test_the_fork_server():
    program = f"""
import multiprocessing
from multiprocessing import forkserver

from {processes.__name__} import find_fork_server, forget_fork_server, list_preloaded, stop_fork_server

multiprocessing.set_forkserver_preload(["json"])
assert (find_fork_server(), list_preloaded()) == (None, ["json"])
forkserver.ensure_running()
first = find_fork_server()
stop_fork_server()
assert first is not None and find_fork_server() is None
forkserver.ensure_running()
forget_fork_server()  # its end of the pipe is closed, at which the server ends
assert find_fork_server() is None
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_the_folder_of_sockets():
    processes.find_process_settings()["probe"] = "here"
    assert multiprocessing.current_process()._config.pop("probe") == "here"


def test_an_exit_code_that_nobody_reports():
    process = multiprocessing.get_context("spawn").Process(target=print)
    process._popen = type("Popen", (), {"returncode": None, "poll": lambda self: self.returncode})()
    processes.set_exit_code(process, 7)
    assert process._popen.returncode == 7


def test_generators_of_numpy():
    assert numpy_generators.is_global_generator(numpy.random.mtrand._rand)
    state = numpy.random.RandomState(3)
    assert not numpy_generators.is_global_generator(state)
    assert isinstance(numpy_generators.find_bit_generator(state), numpy.random.MT19937)


def test_states_of_a_metric():
    metric = torchmetrics.SumMetric()
    metric.update(3.0)
    assert metric_states.has_reductions(metric)
    assert not metric_states.has_reductions(object())
    assert [each.__name__ for each in metric_states.find_reductions(metric).values()] == ["dim_zero_sum"]
    assert metric_states.find_defaults(metric).keys() == metric_states.find_reductions(metric).keys()
    assert metric_states.read_update_count(metric) == 1
    metric_states.set_update_count(metric, 4)
    assert metric._update_count == 4
    assert metric_states.find_last_value(metric) is None
    metric(5.0)
    assert metric_states.find_last_value(metric) == 5
    assert metric_states.find_defaults(object()) is metric_states.read_update_count(object()) is None


def test_a_metric_that_gathers_in_another_way():
    metric = torchmetrics.SumMetric()
    own = metric_states.find_gathering(type(metric))
    assert own is torchmetrics.Metric._sync_dist
    metric_states.set_gathering(metric, print)
    assert metric._sync_dist is print
    metric_states.drop_gathering(metric)
    assert metric._sync_dist.__func__ is own


def test_a_bar_without_a_lock():
    class Bar(tqdm.tqdm):
        pass

    had = progress_bars.has_lock(Bar)
    Bar.set_lock(None)
    assert progress_bars.has_lock(Bar)
    del Bar._lock
    assert progress_bars.has_lock(Bar) == had


def test_objects_that_are_not_of_hugging_face():
    other = object()
    assert hugging_face.plan_dtypes(other, "float16") == {}
    assert list(hugging_face.list_kept_in_float32(other)) == []
    assert hugging_face.list_missing_patterns(other) == hugging_face.list_unexpected_patterns(other) == []
    assert hugging_face.list_unsaved(other) == set()
    assert hugging_face.find_conversions(other) is None
    assert not hugging_face.is_shuffled(other)
    assert not hugging_face.is_split_by_node(other)


def test_streams_of_hugging_face():
    stream = datasets.Dataset.from_dict({"x": [1, 2]}).to_iterable_dataset(num_shards=2)
    assert not hugging_face.is_split_by_node(stream)
    assert hugging_face.is_split_by_node(split_dataset_by_node(stream, rank=0, world_size=2))
