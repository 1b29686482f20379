"""anomalib: a student and teacher on a folder of images, trained and tested by its engine."""

from pathlib import Path

import numpy as np
from PIL import Image


def write_images(root):
    generator = np.random.default_rng(0)
    for folder, number in (("normal", 8), ("abnormal", 4)):
        (root / folder).mkdir(parents=True)
        for index in range(number):
            pixels = generator.integers(100, 120, (64, 64, 3), dtype=np.uint8)
            if folder == "abnormal":
                pixels[16:40, 16:40] = 250
            Image.fromarray(pixels).save(root / folder / f"{index}.png")


def run(settings):
    from anomalib.data import Folder
    from anomalib.engine import Engine
    from anomalib.models import ReverseDistillation

    write_images(Path("images"))
    data = Folder(
        name="squares",
        root="images",
        normal_dir="normal",
        abnormal_dir="abnormal",
        train_batch_size=4,
        eval_batch_size=4,
        num_workers=0,
    )
    model = ReverseDistillation(backbone="resnet18", layers=["layer1", "layer2", "layer3"], pre_trained=False)
    own = {
        key: value
        for key, value in settings.items()
        if key in ("max_epochs", "accelerator", "devices", "enable_progress_bar")
    }
    engine = Engine(**own, logger=False, default_root_dir="results", num_sanity_val_steps=0)
    engine.fit(model=model, datamodule=data)
    results = engine.test(model=model, datamodule=data)
    return {"auroc": float(results[0]["image_AUROC"]), "loss": float(engine.trainer.callback_metrics["image_AUROC"])}
