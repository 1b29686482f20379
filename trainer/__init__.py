"""What the user holds: Trainer, TrainModule, DataModule, and what they are made of."""
