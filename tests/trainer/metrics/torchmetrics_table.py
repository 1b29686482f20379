"""Every metric of torchmetrics that can be built here, with inputs for it, and the reasons of those that are not."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

ROOMS = (
    "aggregation", "audio", "classification", "clustering", "detection", "image", "multimodal", "nominal",
    "regression", "retrieval", "segmentation", "shape", "text", "video", "wrappers",
)  # fmt: skip

BY_BATCH = {
    "RunningMean": "the mean of the last batches only, on each rank of its own",
    "RunningSum": "the sum of the last batches only, on each rank of its own",
    "Running": "the value of the last batches only, on each rank of its own",
    "BinaryFairness": "torchmetrics counts the groups that are in a batch from 0 on, whichever they are",
    "BinaryGroupStatRates": "torchmetrics counts the groups that are in a batch from 0 on, whichever they are",
}
"""Metrics whose value depends, by definition, on which samples share a batch."""

NOT_HERE = {
    "BootStrapper": "draws samples at random",
    "NormalizedRootMeanSquaredError": "torchmetrics cannot merge its states of more than two ranks",
    "Metric": "abstract",
    "BaseAggregator": "the base of others",
    "WrapperMetric": "the base of others",
    "MetricInputTransformer": "the base of others",
    "FeatureShare": "a MetricCollection, for networks that are downloaded",
    "MetricCollection": "a container",
    "CompositionalMetric": "arithmetic of others",
    "DeepImageStructureAndTextureSimilarity": "downloads a network",
    "LearnedPerceptualImagePatchSimilarity": "downloads a network",
    "PerceptualPathLength": "downloads a network",
    "CLIPScore": "downloads a network",
    "CLIPImageQualityAssessment": "downloads a network",
    "ArniqaImageQualityAssessment": "downloads a network",
    "ARNIQA": "downloads a network",
    "BERTScore": "downloads a network",
    "InfoLM": "downloads a network",
}
"""Metrics that are left out wherever the tests run."""

DISPATCHERS = "calls one of the Binary, Multiclass and Multilabel classes"


@dataclass(frozen=True)
class Entry:
    """A metric, and what its `update` gets for some samples."""

    make: Callable[[], Metric]
    inputs: Callable[[int, torch.Generator], tuple[Any, ...]]
    """Returns the arguments of `update` for a number of samples, each a tensor or a list with an element for each."""
    update: Callable[..., None] = field(default=lambda metric, *args: metric.update(*args))
    is_ordered: bool = True
    """Whether the order of the values means something."""


def rand(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda number, generator: torch.rand(number, *shape, generator=generator)


def ints(high: int, *shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda number, generator: torch.randint(high, (number, *shape), generator=generator)


def shares(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    """Rows that add up to 1 along the first dimension of a sample."""
    return lambda number, generator: torch.rand(number, *shape, generator=generator).softmax(1)


def sentences(number: int, generator: torch.Generator) -> list[str]:
    words = ["the", "cat", "sat", "on", "a", "warm", "mat", "and", "saw", "one", "dog"]
    return [
        " ".join(words[place] for place in torch.randint(len(words), (6,), generator=generator).tolist())
        for _ in range(number)
    ]


def references(number: int, generator: torch.Generator) -> list[list[str]]:
    return [[sentence] for sentence in sentences(number, generator)]


def answers(key: str) -> Callable[[int, torch.Generator], list[dict[str, Any]]]:
    def make(number: int, generator: torch.Generator) -> list[dict[str, Any]]:
        texts = sentences(number, generator)
        if key == "prediction_text":
            return [{key: text, "id": str(place)} for place, text in enumerate(texts)]
        return [{key: {"answer_start": [0], "text": [text]}, "id": str(place)} for place, text in enumerate(texts)]

    return make


def boxes(*, scored: bool) -> Callable[[int, torch.Generator], list[dict[str, Tensor]]]:
    def make(number: int, generator: torch.Generator) -> list[dict[str, Tensor]]:
        found = []
        for place in range(number):
            count = 1 + place % 3
            corner = torch.rand(count, 2, generator=generator) * 5
            size = 10 + torch.rand(count, 2, generator=generator) * 5
            one = {"boxes": torch.cat([corner, corner + size], 1), "labels": torch.arange(count) % 2}
            found.append({**one, "scores": torch.rand(count, generator=generator)} if scored else one)
        return found

    return make


def queries(number: int, generator: torch.Generator) -> Tensor:
    return torch.arange(number) % 3


def ratings(number: int, generator: torch.Generator) -> Tensor:
    return torch.tensor([[2, 1, 1], [0, 3, 1], [1, 1, 2]])[torch.arange(number) % 3]


def panoptic(number: int, generator: torch.Generator) -> Tensor:
    return torch.stack([ints(3, 4, 4)(number, generator), ints(2, 4, 4)(number, generator)], -1)


def of(*parts: Callable[[int, torch.Generator], Any]) -> Callable[[int, torch.Generator], tuple[Any, ...]]:
    return lambda number, generator: tuple(part(number, generator) for part in parts)


class Pooled(nn.Module):
    """A network of features without parameters."""

    num_features = 4

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1).float().unflatten(1, (4, -1)).mean(2) + images.flatten(1)[:, :4] / 100.0


def both_kinds(metric: Any, real: Tensor, fake: Tensor) -> None:
    metric.update(real, real=True)
    metric.update(fake, real=False)


ARGUMENTS: Mapping[str, Any] = {
    "num_classes": 3, "num_labels": 3, "beta": 2.0, "min_recall": 0.5, "min_precision": 0.5,
    "min_specificity": 0.5, "min_sensitivity": 0.5, "threshold": 0.5, "p": 3, "data_range": 1.0,
    "things": {0, 1}, "stuffs": {2}, "mouth_map": [0, 1, 2],
    "metric_func": torchmetrics.functional.audio.scale_invariant_signal_noise_ratio,
}  # fmt: skip
"""Arguments of metrics that require them."""

IMAGES = of(rand(3, 32, 32), rand(3, 32, 32))
SIGNALS = of(rand(60), rand(60))
PAIRS = of(rand(), rand())
LABELS = of(ints(3), ints(3))
WORDS = of(sentences, sentences)
BOXES = of(boxes(scored=True), boxes(scored=False))
ROOM_INPUTS: Mapping[str, Callable[..., tuple[Any, ...]]] = {
    "aggregation": of(rand()), "audio": SIGNALS, "clustering": LABELS, "detection": BOXES,
    "image": IMAGES, "nominal": LABELS, "regression": PAIRS, "retrieval": of(rand(), ints(2), queries),
    "segmentation": of(ints(3, 8, 8), ints(3, 8, 8)), "shape": of(rand(5, 3), rand(5, 3)),
    "text": of(sentences, references),
}  # fmt: skip
INPUTS: Mapping[str, Callable[..., tuple[Any, ...]]] = {
    "ComplexScaleInvariantSignalNoiseRatio": of(rand(5, 6, 2), rand(5, 6, 2)),
    "SourceAggregatedSignalDistortionRatio": of(rand(2, 60), rand(2, 60)),
    "PermutationInvariantTraining": of(rand(2, 60), rand(2, 60)),
    "CalinskiHarabaszScore": of(rand(4), ints(3)),
    "DaviesBouldinScore": of(rand(4), ints(3)),
    "DunnIndex": of(rand(4), ints(3)),
    "PanopticQuality": of(panoptic, panoptic),
    "ModifiedPanopticQuality": of(panoptic, panoptic),
    "MultiScaleStructuralSimilarityIndexMeasure": of(rand(1, 32, 32), rand(1, 32, 32)),
    "PeakSignalNoiseRatioWithBlockedEffect": of(rand(1, 32, 32), rand(1, 32, 32)),
    "TotalVariation": of(rand(3, 16, 16)),
    "VisualInformationFidelity": of(rand(1, 48, 48), rand(1, 48, 48)),
    "FrechetInceptionDistance": of(rand(3, 16, 16), rand(3, 16, 16)),
    "KernelInceptionDistance": of(rand(3, 16, 16), rand(3, 16, 16)),
    "MemorizationInformedFrechetInceptionDistance": of(rand(3, 16, 16), rand(3, 16, 16)),
    "InceptionScore": of(rand(3, 16, 16)),
    "FleissKappa": of(ratings),
    "CosineSimilarity": of(rand(4), rand(4)),
    "ContinuousRankedProbabilityScore": of(rand(4), rand()),
    "JensenShannonDivergence": of(shares(4), shares(4)),
    "KLDivergence": of(shares(4), shares(4)),
    "LipVertexError": of(rand(5, 3), rand(5, 3)),
    "Perplexity": of(rand(5, 7), ints(7, 5)),
    "SQuAD": of(answers("prediction_text"), answers("answers")),
    **dict.fromkeys(
        ("CharErrorRate", "EditDistance", "MatchErrorRate", "WordErrorRate", "WordInfoLost", "WordInfoPreserved"), WORDS
    ),
    "MulticlassExactMatch": of(ints(3, 4), ints(3, 4)),
    "QualityWithNoReference": of(rand(3, 32, 32), rand(3, 16, 16), rand(3, 32, 32)),
    "SpatialDistortionIndex": of(rand(3, 32, 32), rand(3, 16, 16), rand(3, 32, 32)),
    "ClasswiseWrapper": of(shares(3), ints(3)),
    "MultioutputWrapper": of(rand(2), rand(2)),
}  # fmt: skip
"""Inputs of metrics that differ from those of their room."""
KINDS = {"Binary": of(rand(), ints(2)), "Multiclass": of(shares(3), ints(3)), "Multilabel": of(rand(3), ints(2, 3))}

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "ROUGEScore": {"rouge_keys": ("rouge1", "rougeL")},
    "FrechetInceptionDistance": {"feature": Pooled(), "normalize": True, "input_img_size": (3, 16, 16)},
    "KernelInceptionDistance": {"feature": Pooled(), "normalize": True, "subsets": 1, "subset_size": 6},
    "MemorizationInformedFrechetInceptionDistance": {"feature": Pooled(), "normalize": True},
    "InceptionScore": {"feature": Pooled(), "normalize": True, "splits": 1},
    "MultiScaleStructuralSimilarityIndexMeasure": {"betas": (0.4, 0.6), "kernel_size": 5},
    "DiceScore": {"input_format": "index"},
    "GeneralizedDiceScore": {"input_format": "index"},
    "HausdorffDistance": {"input_format": "index"},
    "MeanIoU": {"input_format": "index"},
}

WRAPPED: Mapping[str, Callable[[], Metric]] = {
    "ClasswiseWrapper": lambda: torchmetrics.ClasswiseWrapper(
        torchmetrics.classification.MulticlassAccuracy(3, average=None)
    ),
    "MinMaxMetric": lambda: torchmetrics.MinMaxMetric(torchmetrics.MeanSquaredError()),
    "MultioutputWrapper": lambda: torchmetrics.MultioutputWrapper(torchmetrics.MeanSquaredError(), 2),
    "MultitaskWrapper": lambda: torchmetrics.MultitaskWrapper(
        {"mean": torchmetrics.MeanSquaredError(), "rank": torchmetrics.SpearmanCorrCoef()}
    ),
    "BinaryTargetTransformer": lambda: torchmetrics.wrappers.BinaryTargetTransformer(
        torchmetrics.classification.BinaryAUROC(), threshold=0.5
    ),
    "LambdaInputTransformer": lambda: torchmetrics.wrappers.LambdaInputTransformer(
        torchmetrics.classification.BinaryAccuracy(), lambda preds: 1 - preds
    ),
}
WRAPPED_INPUTS = {
    "MultitaskWrapper": of(rand(), rand()),
    "BinaryTargetTransformer": PAIRS,
    "LambdaInputTransformer": of(rand(), ints(2)),
}


def public_classes() -> Iterator[tuple[str, str, type[Metric]]]:
    """Yield the room and the name of each public class of metrics, and the class."""
    seen = set()
    for room in ROOMS:
        module = import_module(f"torchmetrics.{room}")
        for name in sorted(getattr(module, "__all__", vars(module))):
            found = getattr(module, name)
            if inspect.isclass(found) and issubclass(found, Metric | MetricCollection) and found not in seen:
                seen.add(found)
                yield room, name, found


def arguments_of(kind: type[Metric]) -> dict[str, Any]:
    taken = inspect.signature(kind).parameters
    return {name: ARGUMENTS[name] for name in taken if name in ARGUMENTS and name not in ("threshold", "p")} | {
        name: ARGUMENTS[name] for name, one in taken.items() if name in ARGUMENTS and one.default is one.empty
    }


def table() -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the entry of every metric that can be built here, and why the others are not in it."""
    entries, reasons = {}, {}
    for room, name, kind in public_classes():
        if name in NOT_HERE or name in BY_BATCH:
            reasons[name] = NOT_HERE.get(name) or BY_BATCH[name]
            continue
        if "__new__" in vars(kind) and "task" in inspect.signature(kind.__new__).parameters:
            reasons[name] = DISPATCHERS
            continue
        make = WRAPPED.get(name) or partial(kind, **{**arguments_of(kind), **OPTIONS.get(name, {})})
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the memory that some take
                make()
        except (ModuleNotFoundError, RuntimeError) as error:
            if "install" not in str(error):
                raise
            reasons[name] = f"an optional dependency is missing: {str(error)[:80]}"
            continue
        kinds = [inputs for word, inputs in KINDS.items() if room == "classification" and name.startswith(word)]
        inputs = WRAPPED_INPUTS.get(name) or INPUTS.get(name) or (kinds[0] if kinds else ROOM_INPUTS.get(room, PAIRS))
        entries[name] = Entry(make, inputs, **SPECIAL.get(name, {}))
    return entries, reasons


def by_task(metric: Any, one: Tensor, other: Tensor) -> None:
    metric.update({"mean": one, "rank": one}, {"mean": other, "rank": other})


def sharpened(metric: Any, found: Tensor, colors: Tensor, gray: Tensor) -> None:
    metric.update(found, {"ms": colors, "pan": gray})


SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "FrechetInceptionDistance": {"update": both_kinds},
    "KernelInceptionDistance": {"update": both_kinds},
    "MemorizationInformedFrechetInceptionDistance": {"update": both_kinds},
    "MultitaskWrapper": {"update": by_task},
    "QualityWithNoReference": {"update": sharpened},
    "SpatialDistortionIndex": {"update": sharpened},
    "CatMetric": {"is_ordered": False},
}


def taken(part: Any, places: list[int]) -> Any:
    """Return some samples of an argument of `update`."""
    return part[places] if isinstance(part, Tensor) else [part[place] for place in places]
