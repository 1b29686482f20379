"""Names of checkpoints: templates, formats, collisions."""

import math

import pytest

from echelon.callbacks.helpers.checkpoint_name import CheckpointName, name_with_version
from echelon.common.errors import ConfigError


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{epoch}-{step}", "epoch=3-step=40.ckpt"),
        ("{epoch:02d}-{val_loss:.2f}", "epoch=03-val_loss=0.12.ckpt"),
        ("run-{step:06d}", "run-step=000040.ckpt"),
        ("best/{val/acc:.1f}", "best/val_acc=0.5.ckpt"),
        ("{val_loss}", "val_loss=0.123457.ckpt"),
        ("plain", "plain.ckpt"),
    ],
)
def test_fields_are_filled_with_metric_names(template: str, name: str) -> None:
    values = {"epoch": 3, "step": 40, "val_loss": 0.123456789, "val/acc": 0.5}
    assert CheckpointName(template).fill(values) == name


def test_names_are_left_out_on_request() -> None:
    template = CheckpointName("e{epoch}_loss{val/loss:.2f}", insert_metric_name=False)
    assert template.fill({"epoch": 1, "val/loss": 0.25}) == "e1_loss0.25.ckpt"
    assert template.fields == ["epoch", "val/loss"]


def test_a_metric_not_yet_logged_reads_0() -> None:
    """As in Lightning 2.6.6."""
    assert CheckpointName("{val_loss:.2f}-{other}-{third:d}").fill({}) == "val_loss=0.00-other=0-third=0.ckpt"
    assert CheckpointName("{val_loss:.2f}").fill({"val_loss": math.inf}) == "val_loss=inf.ckpt"


@pytest.mark.parametrize("template", ["{epoch", "epoch}", "{}", "{:.2f}", "{{epoch}}", ""])
def test_a_broken_template_is_refused_at_once(template: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid template; write fields as"):
        CheckpointName(template)


def test_a_format_that_does_not_fit_is_named_with_the_value() -> None:
    with pytest.raises(
        ConfigError, match=r"val_loss=0\.5 cannot be written as '\{val_loss:d\}'.*give it another format"
    ):
        CheckpointName("{val_loss:d}").fill({"val_loss": 0.5})


def test_collisions_get_a_version() -> None:
    assert name_with_version("epoch=3.ckpt", 1) == "epoch=3-v1.ckpt"
