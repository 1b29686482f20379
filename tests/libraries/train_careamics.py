"""careamics: an image denoiser without clean targets, with its own callbacks; read back from its best checkpoint."""

import numpy as np


def run(settings):
    from careamics import CAREamist
    from careamics.config import create_n2v_configuration

    image = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    config = create_n2v_configuration(
        experiment_name="denoiser",
        data_type="array",
        axes="YX",
        patch_size=[16, 16],
        batch_size=4,
        num_epochs=settings["max_epochs"],
        model_params={"depth": 2, "num_channels_init": 8},
    )
    careamist = CAREamist(source=config, work_dir="denoiser")
    careamist.train(train_source=image, val_source=image[:32, :32])
    sample = {"source": image[:32, :32], "data_type": "array", "axes": "YX"}
    (found,) = careamist.predict(**sample)
    careamist.trainer.save_checkpoint("denoiser.ckpt")
    (again,) = CAREamist(source="denoiser.ckpt", work_dir="again").predict(**sample)
    np.testing.assert_allclose(again, found, rtol=1e-3)
    return {"mean": float(np.mean(found)), "spread": float(np.std(found))}
