"""The same program gives the same with Lightning and with Echelon; what Lightning 2.6.6 gave is recorded here.

Run it with an interpreter that has both, and Lightning's half is not skipped.
"""

from __future__ import annotations

from typing import Any

import beside
import pytest

RECORDED: dict[str, Any] = {
    "around_a_fit": {
        "saved": True,
        "global_step": 8,
        "validated": {"val_loss": 0.0003},
        "predicted": [(2, 1), (2, 1), (2, 1), (2, 1)],
        "saved again": True,
        "resumed": (4, 16),
    },
    "epochs_that_are_counted": {
        "notes": [
            ("on_train_start", 0, 0),
            ("on_train_epoch_start", 0, 0),
            ("on_validation_epoch_end", 0, 0),
            ("on_train_epoch_end", 0, 0),
            ("on_train_epoch_start", 1, 1),
            ("on_validation_epoch_end", 1, 1),
            ("on_train_epoch_end", 1, 1),
            ("on_train_end", 2, 2),
        ],
        "after": 2,
        "resumed": [("on_train_start", 2, 2)],
        "end": 3,
    },
    "metrics_in_hooks": {
        "notes": [
            ("on_train_batch_end", {"loss": 0.01, "loss_step": 0.01}),
            ("on_train_batch_end", {"loss": 0.0063, "loss_step": 0.0063}),
            ("on_validation_epoch_end", {"loss": 0.0063, "loss_step": 0.0063, "val_loss": 0.0039}),
            ("on_train_epoch_end", {"loss": 0.0082, "loss_epoch": 0.0082, "loss_step": 0.0063, "val_loss": 0.0039}),
        ],
        "logged": {"loss_epoch": 0.0082, "loss_step": 0.0063, "val_loss": 0.0039},
    },
    "batches_moved_by_super": {"notes": [("cpu", 0), ("cpu", 0), ("cpu", 0), ("cpu", 0)]},
    "files_after_a_resume": {"kept": ["epoch=0.ckpt"], "others": ["epoch=3.ckpt"]},
    "loss_of_closures": {
        "notes": [(0.0052, 0.0052), (0.0024, 0.0024), (0.0011, 0.0011), (0.0006, 0.0006)],
        "epoch": {"loss": 0.0032, "loss_epoch": 0.0032, "loss_step": 0.0006},
        "global_step": 4,
    },
    "settings_that_are_none": {
        "max_epochs": -1,
        "steps": 5,
        "without limits": (1000, -1, 1),
        "limit_val_batches": 1.0,
        "log_every_n_steps": 50,
        "loggers": [],
    },
    "limits_in_batches": {0: (0, []), 3: (3, [3]), 0.5: (2, [2]), 1.0: (4, [4]), 2.0: (2, [2])},
    "what_ends_an_epoch": {"by callback": 8, "by module": (4, 2)},
    "loaders_that_are_asked_for_again": {"train": [0, 2], "validate": [0, 1, 3]},
    "one_batch_to_overfit": {
        "notes": [
            ("train", [0, 1]),
            ("train", [2, 3]),
            ("validate", [0, 1]),
            ("validate", [2, 3]),
            ("train", [0, 1]),
            ("train", [2, 3]),
            ("validate", [0, 1]),
            ("validate", [2, 3]),
        ]
    },
    "reductions_of_an_epoch": {"MAX": 4.0, "a": 1.0, "avg": 2.2857, "b": 4.0, "mean": 2.2857, "min": 1.0, "sum": 10.0},
    "two_validation_loaders": {
        "results": [{"val_loss/dataloader_idx_0": 0.01}, {"together": 1.0, "val_loss/dataloader_idx_1": 0.01}],
        "batches": [0, 1, 0, 1, 2],
    },
    "a_plateau_with_a_monitor": {"lr": 0.0125},
    "names_of_checkpoints": {
        "saved": ["epoch=1-val_loss=0.000-missing=0.ckpt", "epoch=2-val_loss=0.000-missing=0.ckpt"],
        "best": "epoch=2-val_loss=0.000-missing=0.ckpt",
        "score": 0.0001,
        "kth": "epoch=1-val_loss=0.000-missing=0.ckpt",
        "by epoch": "epoch=2-step=12.ckpt",
    },
    "an_early_stop": {"stopped": 2, "waited": 2, "best": 0.0012, "epoch": 3},
    "a_stop_inside_an_epoch": {
        "notes": [("validated", 4), ("epoch ended", 4), ("validated", 6), ("epoch ended", 6)],
        "global_step": 6,
    },
    "validations_inside_an_epoch": {0.5: [2, 4, 6, 8], 3: [3, 7], 1.0: [4, 8]},
    "schedulers_of_steps_and_epochs": {"lr": [1.0, 1.0, 0.5, 0.5, 0.025, 0.025, 0.0125, 0.0125]},
    "rates_around_validation": {
        "epochs": "S1 E1 S1 L E0.1 V0.1 e0.1 S0.1 E0.1 S0.1 L E0.01 V0.01 e0.01",
        "validation inside": "S1 E1 V1 S1 L E0.1 V0.1 e0.1 S0.1 E0.1 V0.1 S0.1 L E0.01 V0.01 e0.01",
        "steps, then epochs": "S1 L E0.5 S0.5 L L E0.025 V0.025 e0.025",
        "accumulated": "S1 E1 S1 L E0.1 V0.1 e0.1 S0.1 E0.1 S0.1 L E0.01 V0.01 e0.01",
        "cut short": "S1 E1 S1 L E0.1 V0.1 e0.1 S0.1 E0.1 e0.1",
        "plateau": "S1 E1 S1 E1 V1 e1 M S0.1 E0.1 S0.1 E0.1 V0.1 e0.1 M",
    },
    "steps_around_the_forward": {
        "each batch": ("start step 0 forward 1 zero before after update clip end", 1),
        "accumulated": ("start forward 0 zero before after end start step 1 forward 2 before after update clip end", 1),
        "LBFGS": ("start forward 0 zero before after update clip forward 0 zero before after update clip end", 1),
        "LBFGS, too": (
            "start step 0 forward 1 zero before after update clip forward 1 zero before after update clip end",
            1,
        ),
        "without a loss": (
            "start step 0 forward 1 zero update clip end start step 1 forward 2 zero update clip end",
            2,
        ),
        "without a loss, not overridden": (
            "start forward 0 zero update clip end start forward 0 zero update clip end",
            2,
        ),
    },
    "accumulation_at_an_uneven_end": {"notes": [0, 0, 1, 2, 2, 2, 3, 4], "stepping": 4},
    "hooks_of_a_fit": {
        "hooks": [
            "on_fit_start",
            "on_train_start",
            "on_train_epoch_start",
            "on_train_batch_start",
            "on_before_zero_grad",
            "on_before_backward",
            "on_after_backward",
            "on_before_optimizer_step",
            "on_train_batch_end",
            "on_train_batch_start",
            "on_before_zero_grad",
            "on_before_backward",
            "on_after_backward",
            "on_before_optimizer_step",
            "on_train_batch_end",
            "on_validation_start",
            "on_validation_epoch_start",
            "on_validation_batch_start",
            "on_validation_batch_end",
            "on_validation_epoch_end",
            "on_validation_end",
            "on_train_epoch_end",
            "on_train_end",
            "on_fit_end",
        ]
    },
    "what_is_refused": {
        "learning rates without a logger": True,
        "top k without a monitor": True,
        "a metric that was not logged": True,
        "a fraction of no batch": True,
        "an unknown clipping": True,
        "validation that never comes": True,
        "one callback twice": True,
        "a step without its closure": True,
        "a loss that is a list": True,
        "a metric that is a string": True,
    },
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_program_gives_what_lightning_gave(name: str, framework: Any) -> None:
    assert getattr(beside, name)(framework) == RECORDED[name]
