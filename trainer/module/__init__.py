"""TrainModule, DataModule, hyper-parameters, losses and optimizers. Imports metrics and checkpoint."""
