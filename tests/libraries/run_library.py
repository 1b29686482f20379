"""Trains one library with Lightning or with Echelon in its place, and prints what it observed, as JSON.

``python tests/libraries/run_library.py torchgeo echelon`` in an environment with the libraries (`make test-libraries`).
"""

import importlib
import json
import logging
import os
import sys
import tempfile
import warnings

SETTINGS = {
    "max_epochs": 2,
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def main(library, framework):
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if framework == "echelon":
        import echelon.lightning

        echelon.lightning.stand_in()
    import torch

    torch.manual_seed(0)
    program = importlib.import_module(f"train_{library}")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        observed = program.run(dict(SETTINGS))
        os.chdir("/")
    used = sorted({name.partition(".")[0] for name, module in sys.modules.items() if "lightning" in name and module})
    files = [
        getattr(sys.modules[name], "__file__", None) for name in ("lightning", "pytorch_lightning") if name in used
    ]
    assert all(files) == (framework == "lightning"), f"{framework} was to train, got {files}"
    print(json.dumps(observed))


if __name__ == "__main__":
    main(*sys.argv[1:])
