"""Sweep of transformers' causal language models: which of them tensor parallelism takes at which degree, and why not.

Each is built with the default config of its class, two layers deep, on the meta device; nothing is downloaded. Not a
test, since it takes minutes: ``python tests/libraries/sweep_tensor_plans.py [--tp 2 4 8 16] [--only name ...]``.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import warnings
from collections import Counter

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")


def families() -> dict[str, str]:
    """Return the names of transformers' causal language models by model type."""
    from transformers.models.auto import modeling_auto

    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    return {kind: name if isinstance(name, str) else name[0] for kind, name in names}


def built(kind: str) -> torch.nn.Module:
    """Return the model of a family, two layers deep, on the meta device."""
    import transformers

    config = transformers.AutoConfig.for_model(kind)
    for part in (config, getattr(config, "text_config", None), getattr(config, "decoder", None)):
        if part is not None:
            _shorten(part)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def _shorten(config: object) -> None:
    attributes = vars(config)
    for name in _DEPTHS:
        if isinstance(attributes.get(name), int) and attributes[name] > 2:
            setattr(config, name, 2)
    if isinstance(attributes.get("layer_types"), list):
        config.layer_types = attributes["layer_types"][:2]  # type: ignore[attr-defined]


def reason(error: Exception) -> str:
    """Return the first part of an error's message, without names and numbers."""
    return re.sub(r"\d+", "N", f"{type(error).__name__}: {error}")[:160]


def main() -> None:
    """Print a line for each family and degree that is refused, and the number of those that are taken."""
    from echelon import ParallelStrategy

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--only", nargs="+", default=None)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    taken, number = Counter[int](), 0
    for kind, name in families().items():
        if arguments.only and kind not in arguments.only:
            continue
        try:
            model = built(kind)
        except Exception as error:  # noqa: BLE001 one that does not build is not counted
            print(f"{kind:<24} does not build: {reason(error)}", flush=True)
            continue
        number += 1
        for tp in arguments.tp:
            try:
                ParallelStrategy(tp=tp).plan(model)
                taken[tp] += 1
            except Exception as error:  # noqa: BLE001 its message is the result
                print(f"{kind:<24} tp={tp:<3} {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        del model
        gc.collect()
    print(f"of {number}: " + ", ".join(f"tp={tp} takes {taken[tp]}" for tp in arguments.tp))


if __name__ == "__main__":
    main()
