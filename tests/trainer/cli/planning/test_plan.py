"""``echelon plan``: the table, the figure and the lines to paste; and what cannot be planned."""

import json
import textwrap
from pathlib import Path

import pytest
import yaml

from echelon.trainer.cli.main import main
from echelon.trainer.cli.planning import plan_figure

MODULE = """
import signal

import torch
from torch import nn
import echelon

class Blocks(echelon.TrainModule):
    def __init__(self, width=512, depth=4, reads=False):
        super().__init__()
        self.reads = reads
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))

    def training_step(self, batch, batch_idx):
        loss = self.blocks(batch).square().mean()
        if self.reads and loss.item() > 1:
            loss = loss / 2
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.trainer.estimated_stepping_batches * 1e-3)

class Drawn(Blocks):
    def __init__(self, width=512, depth=4):
        super().__init__(width, depth)
        nn.init.trunc_normal_(self.blocks[0][0].weight, std=0.02)

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters())

class Asking(Blocks):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def training_step(self, batch, batch_idx):
        loss = self.blocks(batch).square().mean()
        if self.how == "numpy":
            self.log("loss", float(loss.detach().numpy()))
        elif self.how == "format":
            f"{loss:.3f}"
        return {"nothing": None, "no gradient": loss.detach()}.get(self.how, loss)

class ByHand(Blocks):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.blocks(batch).square().mean())
        self.optimizers().step()

class Searching(Blocks):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), max_iter=2)

class Slow(Blocks):
    def training_step(self, batch, batch_idx):
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the step went on")

class Failing(Blocks):
    def __init__(self):
        raise ValueError("no such tokenizer")

class PartlyUsed(Blocks):
    def __init__(self):
        super().__init__()
        self.later = nn.Linear(512, 512)

class Rows(echelon.DataModule):
    def __init__(self, num_rows=64):
        super().__init__()
        self.num_rows = num_rows

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(self.num_rows, 512), 16)
"""
CONFIG = """
trainer: {max_epochs: 1, gradient_clip_val: 1.0}
module: {_target_: module_to_plan.Blocks, width: 512, depth: 4, reads: false}
data: {_target_: module_to_plan.Rows}
"""
PARAMETERS = 4 * (4 * (512 * 512 + 512))


@pytest.fixture(autouse=True)
def config(tmp_path, monkeypatch):
    (tmp_path / "module_to_plan.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def planned(capsys, *words):
    assert main(["plan", "config.yaml", "--json", *words]) in (0, 1)
    printed = capsys.readouterr()
    assert printed.out, printed.err
    return json.loads(printed.out)


def sent_by(traffic):
    """What is waited for counts before what is sent while the device computes."""
    waited_for = sum(sent for axis, sent in traffic.items() if not axis.startswith("dp_"))
    return round(waited_for), round(sum(traffic.values()))


def test_layouts_that_fit_come_first_by_what_they_send(capsys, config):
    plan = planned(capsys, "--devices", "4", "--memory", "14MB", "--png", "bars.png")
    layouts = plan["layouts"]
    fitting = [layout["fits"] for layout in layouts]
    assert fitting == sorted(fitting, reverse=True)
    assert True in fitting
    assert False in fitting
    # pipelines, whose ranks wait for each other, come behind
    order = [(layout["idle"] > 0, *sent_by(layout["traffic"])) for layout in layouts if layout["fits"]]
    assert order == sorted(order)
    assert "pp 2 x fsdp 2" in {layout["layout"] for layout in layouts}
    modes = {layout["trainer"].get("activation_checkpointing") for layout in layouts}
    assert modes == {None, "selective", "full"}
    by_name = {(layout["layout"], "activation_checkpointing" in layout["trainer"]): layout for layout in layouts}
    assert by_name["ddp", False]["parameters"] == by_name["ddp", False]["gradients"] == PARAMETERS
    assert by_name["ddp", False]["total"] > 4 * PARAMETERS > 14e6 * 0.9
    assert not by_name["ddp", False]["fits"]
    assert by_name["fsdp", False]["parameters"] == pytest.approx(PARAMETERS / 4)
    for layout in layouts:  # each with the global batch of 4 ranks that read the loader's batches
        given = layout["trainer"]["strategy"]
        readers = 4 if isinstance(given, str) else 4 // (given.get("tp", 1) * given.get("pp", 1))
        micro_batches = layout["trainer"].get("accumulate_grad_batches", 1)
        assert readers * layout["micro_batch"] * micro_batches == plan["global_batch_size"] == 64
    assert (config / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_printed_can_be_pasted(capsys, config):
    assert (
        main(["plan", "config.yaml", "--devices", "2", "--memory", "1GB", "--gpu", "H100", "--bandwidth", "10GB"]) == 0
    )
    printed = capsys.readouterr().out
    assert f"Blocks, {PARAMETERS / 4e6:.1f} M parameters: 2 devices of 1.00 GB, 32 samples per step" in printed
    lines = printed.partition("The first in a config:\n")[2].partition("Drawn as")[0]
    assert yaml.safe_load(lines) == {"trainer": {"strategy": "ddp"}}
    assert "Step" in printed
    assert (config / "plan.png").exists()


def test_selective_recomputation_computes_no_product_again(capsys, config):
    plan = planned(capsys, "--devices", "2", "--memory", "1GB", "--gpu", "H100", "--png", "bars.png")
    of_ddp = [layout for layout in plan["layouts"] if layout["layout"] == "ddp"]
    by_mode = {layout["trainer"].get("activation_checkpointing"): layout for layout in of_ddp}
    none, selective, full = (by_mode[mode] for mode in (None, "selective", "full"))
    assert none["flops"] == selective["flops"] < full["flops"]  # no product is computed again
    assert none["seconds"] <= selective["seconds"] <= full["seconds"]


def test_a_setting_of_the_config_is_the_only_one_that_is_planned(capsys, config):
    plan = planned(capsys, "--devices", "2", "--memory", "1GB", "trainer.activation_checkpointing=selective")
    modes = {layout["trainer"].get("activation_checkpointing") for layout in plan["layouts"]}
    assert modes == {None, "selective"}


def test_what_auto_takes_is_said_where_another_layout_comes_first(capsys, config):
    digits = Path(__file__).parents[4] / "examples" / "digits.yaml"
    assert main(["plan", str(digits), "--devices", "2", "--memory", "16GB"]) == 0
    printed = capsys.readouterr().out
    first = yaml.safe_load(printed.partition("The first in a config:\n")[2].partition("strategy=")[0])
    assert first["trainer"]["strategy"] == "fsdp"
    assert 'strategy="auto" takes ddp, the simplest that fits; fsdp comes first here because it sends less.' in printed
    main(["plan", "config.yaml", "--devices", "2", "--memory", "1GB"])
    assert 'strategy="auto"' not in capsys.readouterr().out


def test_the_figure_of_a_model_that_is_small_beside_the_memory_shows_its_bars(config, monkeypatch):
    drawn = []
    original = plan_figure.draw_bars
    monkeypatch.setattr(plan_figure, "draw_bars", lambda axes, *rest: [original(axes, *rest), drawn.append(axes)])
    main(["plan", "config.yaml", "--devices", "2", "--memory", "800GB"])
    main(["plan", "config.yaml", "--devices", "2", "--memory", "40MB"])
    for axes, label in zip(drawn, ("its memory, 800 GB, lies far to the right", "the solid line"), strict=True):
        assert label in axes.get_xlabel()
        ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
        assert max(ends) > 0.3 * axes.get_xlim()[1]


def test_nothing_fits_is_said_with_the_nearest(capsys):
    assert main(["plan", "config.yaml", "--devices", "2", "--memory", "1MB"]) == 1
    assert "No layout fits: the closest, " in capsys.readouterr().out


def test_a_module_that_needs_values_is_measured(capsys, config):
    words = ["--devices", "1", "--memory", "1GB", "module.reads=true"]
    assert main(["plan", "config.yaml", *words]) == 1
    error = capsys.readouterr().err
    assert "needs the values of a tensor at" in error
    assert "loss.item() > 1" in error
    assert "--measure" in error
    measured, imagined = planned(capsys, *words, "--measure"), planned(capsys, *words[:-1])
    [real, *_], [without, *_] = measured["layouts"], imagined["layouts"]
    for kind in ("parameters", "gradients", "optimizer", "activations"):
        assert real[kind] == pytest.approx(without[kind], rel=0.01)


def test_what_initializes_and_counts_by_values_is_planned(capsys, config):
    (config / "config.yaml").write_text(CONFIG.replace("Blocks, width: 512, depth: 4, reads: false", "Drawn"))
    [ddp, *_] = planned(capsys, "--devices", "2", "--memory", "1GB")["layouts"]
    assert ddp["optimizer"] == pytest.approx(PARAMETERS, rel=1e-4)


def test_the_optimizer_of_the_config_counts(capsys, config):
    (config / "config.yaml").write_text(CONFIG + "optimizer: {_target_: torch.optim.SGD, lr: 0.1}\n")
    assert planned(capsys, "--devices", "1", "--memory", "1GB")["layouts"][0]["optimizer"] == 0


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("numpy", "loss.detach().numpy()"),
        ("format", 'f"{loss:.3f}"'),
        ("no gradient", "returned a loss without gradient; compute it from the parameters"),
        ("nothing", "took a step in which no parameter got a gradient"),
    ],
)
def test_a_step_that_cannot_be_profiled_says_why(capsys, config, how, said):
    (config / "config.yaml").write_text(
        CONFIG.replace("Blocks, width: 512, depth: 4, reads: false", f"Asking, how: {how}")
    )
    assert main(["plan", "config.yaml", "--devices", "1", "--memory", "1GB"]) == 1
    assert said in capsys.readouterr().err


def test_a_step_by_hand_takes_one_batch(capsys, config):
    (config / "config.yaml").write_text(CONFIG.replace("Blocks, width: 512, depth: 4, reads: false", "ByHand"))
    (config / "config.yaml").write_text((config / "config.yaml").read_text().replace(", gradient_clip_val: 1.0", ""))
    plan = planned(capsys, "--devices", "4", "--memory", "1GB")
    batches = {layout["layout"]: layout["micro_batch"] for layout in plan["layouts"]}
    assert (batches["ddp"], batches["fsdp"]) == (16, 16)
    assert not any("accumulate_grad_batches" in layout["trainer"] for layout in plan["layouts"])


def test_micro_batches_make_up_the_global_batch(capsys):
    for batch, memory in ((28, "1GB"), (96, "1GB"), (96, "1MB")):
        plan = planned(capsys, "--devices", "4", "--memory", memory, "--global-batch-size", str(batch))
        for layout in plan["layouts"]:
            number = layout["trainer"].get("accumulate_grad_batches", 1) * layout["micro_batch"]
            assert batch % number == 0, layout
        [ddp] = {layout["micro_batch"] for layout in plan["layouts"] if layout["layout"] == "ddp"}
        assert ddp == {(28, "1GB"): 7, (96, "1GB"): 12, (96, "1MB"): 1}[batch, memory]


def test_what_is_printed_fits_to_what_the_config_says(capsys):
    words = ["--devices", "2", "--memory", "1GB"]
    [first, *_] = planned(capsys, *words, "trainer.global_batch_size=64")["layouts"]
    assert "accumulate_grad_batches" not in first["trainer"]
    for given, expected in (("64", 64), ("32", 32)):
        words = ["--devices", "1", "--memory", "1GB", "--global-batch-size", given]
        [first, *_] = planned(capsys, *words, "trainer.global_batch_size=16")["layouts"]
        assert first["trainer"]["global_batch_size"] == expected
    [first, *_] = planned(capsys, *words[:4], "--global-batch-size", "16", "trainer.accumulate_grad_batches=3")[
        "layouts"
    ]
    assert first["trainer"]["accumulate_grad_batches"] == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--devices", "2", "--memory", "80"], 2, "--memory must be a number with a unit, got '80'"),
        (["--devices", "2"], 2, "--devices and --memory must be given together, got only --devices"),
        (["--devices", "0", "--memory", "1GB"], 2, "--devices must be from 1 to 1,048,576, got 0"),
        (["--devices", "9", "--memory", "1GB"], 2, "--nodes must divide --devices 9, got none, and 8 on each leave"),
        (["--devices", "2", "--memory", "9" * 400 + "GB"], 2, "--memory must be a number with a unit"),
        (["--nodes", "2"], 2, "--nodes 2 needs --devices"),
        (["--devices", "2", "--memory", "1GB", "--bandwidth", "9GB"], 2, "--bandwidth 9GB is for the time of a step"),
        (["--devices", "2", "--memory", "1GB", "--global-batch-size", "0"], 2, "--global-batch-size must be >= 1"),
        (
            ["--devices", "2", "--memory", "1GB", "trainer.accumulate_grad_batches=0"],
            2,
            "accumulate_grad_batches must be >= 1, got 0",
        ),
        pytest.param(
            ["--devices", "2", "--memory", "1GB", "data.num_rows=0"],
            1,
            "its training loader has no batch",
            marks=pytest.mark.filterwarnings("ignore:Nothing is trained"),
        ),
        (["--devices", "6", "--nodes", "4", "--memory", "1GB"], 2, "--nodes must divide --devices 6, got 4"),
        (["--devices", "2", "--memory", "1GB", "--gpu", "abacus"], 2, "--gpu must be a device whose peak is known"),
        (["--devices", "2", "--memory", "1GB", "data=null"], 1, "There is no training loader"),
        (["--devices", "7", "--memory", "1GB", "--global-batch-size", "8"], 2, "cannot share a global batch of 8"),
    ],
)
def test_what_cannot_be_planned_says_why(capsys, words, code, said):
    assert main(["plan", "config.yaml", *words]) == code
    assert said in capsys.readouterr().err


def test_replicas_of_a_module_with_unused_parameters_are_told_so(capsys):
    plan = planned(capsys, "--devices", "2", "--memory", "1GB", "module={_target_: module_to_plan.PartlyUsed}")
    given = {layout["layout"]: layout["trainer"]["strategy"] for layout in plan["layouts"]}
    options = {"_target_": "echelon.strategies.DDPOptions", "find_unused_parameters": True}
    assert given["ddp"] == {"_target_": "echelon.strategies.DDPStrategy", "find_unused_parameters": True}
    assert given["zero"] == {"_target_": "echelon.strategies.ZeroStrategy", "ddp": options}


def test_ctrl_c_ends_a_step_at_once(capsys):
    assert main(["plan", "config.yaml", "module={_target_: module_to_plan.Slow}"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_layouts_that_refuse_the_optimizer_are_not_possible(capsys):
    searching = "module={_target_: module_to_plan.Searching, width: 512, depth: 2}"
    plan = planned(capsys, "--devices", "2", "--memory", "1GB", "--measure", searching)
    assert {layout["layout"] for layout in plan["layouts"]} == {"ddp"}
    assert all("LBFGS" in plan["refused"][name] for name in ("zero", "fsdp", "pp 2"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data=null"], "There is no training loader"),
        (["module.nope=1"], "nope"),
        (["--png", "no_folder/plan.png"], "no_folder/plan.png"),
        (["module={_target_: module_to_plan.Failing}"], "ValueError: no such tokenizer"),
    ],
)
def test_an_error_is_json_too(capsys, words, said):
    try:
        code = main(["plan", "config.yaml", "--devices", "2", "--memory", "1GB", "--json", *words])
    except ValueError:  # of the module, whose traceback Python shows
        code = 1
    assert code in (1, 2)
    assert said in json.loads(capsys.readouterr().out)["error"]
