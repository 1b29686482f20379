"""rl4co: a policy for short tours, by reinforcement, in its own trainer; read back with its baseline."""

import torch


def run(settings):
    from rl4co.envs import TSPEnv
    from rl4co.models import AttentionModel, AttentionModelPolicy
    from rl4co.utils import RL4COTrainer

    from lightning import Callback

    class Seeded(Callback):  # what is drawn does not depend on how often a loader asks the generator
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            torch.manual_seed(trainer.global_step)

        def on_train_epoch_end(self, trainer, module):
            torch.manual_seed(trainer.current_epoch)

    def new_policy():
        return AttentionModelPolicy(env_name=env.name, embed_dim=16, num_encoder_layers=1, num_heads=2)

    env = TSPEnv(generator_params={"num_loc": 5})
    model = AttentionModel(
        env, policy=new_policy(), baseline="rollout", batch_size=8, train_data_size=16, val_data_size=8
    )
    trainer = RL4COTrainer(**settings, precision="32-true", callbacks=[Seeded()])
    trainer.fit(model)
    trainer.save_checkpoint("policy.ckpt")
    restored = AttentionModel.load_from_checkpoint("policy.ckpt", env=env, policy=new_policy(), weights_only=False)
    torch.testing.assert_close(restored.policy.state_dict(), model.policy.state_dict())
    torch.testing.assert_close(restored.baseline.state_dict(), model.baseline.state_dict())
    torch.manual_seed(0)
    tours = env.reset(env.generator.__class__(num_loc=5)(4))
    return {
        "reward": float(trainer.callback_metrics["val/reward"]),
        "train": float(trainer.callback_metrics["train/reward"]),
        "restored": float(restored.policy(tours, env, phase="test", decode_type="greedy")["reward"].mean()),
    }
