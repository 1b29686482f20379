"""scvi-tools: scVI on synthetic counts, with early stopping, its own logger and its own progress bar."""

import numpy as np


def run(settings):
    import anndata
    import scvi

    scvi.settings.seed = 0
    generator = np.random.default_rng(0)
    cells = anndata.AnnData(generator.poisson(2.0, (120, 30)).astype(np.float32))
    scvi.model.SCVI.setup_anndata(cells)
    model = scvi.model.SCVI(cells, n_hidden=16, n_latent=3)
    model.train(max_epochs=settings["max_epochs"], accelerator="cpu", batch_size=32, early_stopping=True)
    assert model.get_latent_representation().shape == (120, 3)
    model.save("scvi", overwrite=True)
    scvi.model.SCVI.load("scvi", adata=cells)
    return {"elbo": float(model.history["elbo_train"].iloc[-1].item()), "validation": float(model.get_elbo())}
