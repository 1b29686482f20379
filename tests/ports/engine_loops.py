"""Three loops of the ports beside this file, changed as little as an `Engine` asks for."""

import port_dcgan
import port_frozen_backbone
import port_nanogpt
import torch
from torch import nn
from torch.utils.data import DataLoader

from echelon import Engine


def nanogpt(strategy="single"):
    engine = Engine(strategy=strategy, accelerator="cpu")
    engine.launch()
    torch.manual_seed(1337)
    model = port_nanogpt.GPT()
    model, optimizer = engine.setup(model, model.configure_optimizers())
    windows = iter(port_nanogpt.Windows(engine.global_rank, engine.world_size))
    accumulate = port_nanogpt.ACCUMULATE // engine.world_size
    losses = []
    for iter_num in range(port_nanogpt.ITERS):
        for group in optimizer.param_groups:
            group["lr"] = port_nanogpt.get_lr(iter_num)
        step_losses = []
        for micro_step in range(accumulate):
            with engine.no_backward_sync(model, enabled=micro_step < accumulate - 1):
                _, loss = model(*next(windows))
                engine.backward(loss / accumulate)
            step_losses.append(loss.item())
        engine.clip_gradients(optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(engine.all_reduce(sum(step_losses) / accumulate))
    return losses, model


def dcgan(strategy="single"):
    engine = Engine(strategy=strategy, accelerator="cpu")
    engine.launch()
    torch.manual_seed(9)
    net_g = port_dcgan.build_generator().apply(port_dcgan.weights_init)
    net_d = port_dcgan.build_discriminator().apply(port_dcgan.weights_init)
    criterion = nn.BCELoss()
    net_d, optimizer_d = engine.setup(net_d, torch.optim.Adam(net_d.parameters(), **port_dcgan.ADAM))
    net_g, optimizer_g = engine.setup(net_g, torch.optim.Adam(net_g.parameters(), **port_dcgan.ADAM))
    loader = engine.setup_dataloaders(DataLoader(port_dcgan.images(), port_dcgan.BATCH // engine.world_size))
    generator = torch.Generator().manual_seed(10)
    losses = []
    for _epoch in range(port_dcgan.EPOCHS):
        for (real,) in loader:
            net_d.zero_grad()
            err_d_real = criterion(net_d(real), torch.ones(len(real)))
            engine.backward(err_d_real)
            noise = torch.randn(port_dcgan.BATCH, port_dcgan.NZ, 1, 1, generator=generator)
            fake = net_g(noise.chunk(engine.world_size)[engine.global_rank])
            err_d_fake = criterion(net_d(fake.detach()), torch.zeros(len(real)))
            engine.backward(err_d_fake)
            optimizer_d.step()
            net_g.zero_grad()
            err_g = criterion(net_d(fake), torch.ones(len(real)))
            engine.backward(err_g)
            optimizer_g.step()
            losses += [engine.reduce(err_d_real + err_d_fake).item(), engine.reduce(err_g).item()]
    return losses, nn.ModuleList([net_g, net_d])


def frozen_backbone(strategy="single"):
    engine = Engine(strategy=strategy, accelerator="cpu")
    engine.launch()
    torch.manual_seed(12)
    model = port_frozen_backbone.Classifier()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer, scheduler = port_frozen_backbone.make_optimizer(model)
    model, optimizer = engine.setup(model, optimizer)
    train, val = engine.setup_dataloaders(
        DataLoader(port_frozen_backbone.split(32, 13), port_frozen_backbone.BATCH // engine.world_size),
        DataLoader(port_frozen_backbone.split(8, 14), port_frozen_backbone.BATCH),
    )
    losses = []
    for _epoch in range(port_frozen_backbone.EPOCHS):
        model.train()
        model.backbone.eval()
        for images, targets in train:
            optimizer.zero_grad()
            loss = criterion(model(images), targets)
            engine.backward(loss)
            optimizer.step()
            losses.append(engine.reduce(loss).item())
        scheduler.step()
        model.eval()
        with torch.no_grad():
            for images, _targets in val:
                model(images)
    return losses, model


LOOPS = {"nanogpt": nanogpt, "dcgan": dcgan, "frozen_backbone": frozen_backbone}
