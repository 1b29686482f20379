"""A graph classifier in the manner of PyG's examples: the batch is an object with ``.to()``, not a tensor."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from echelon import Trainer, TrainModule, seed_everything

EPOCHS, BATCH, LR = 3, 8, 0.01


class Data:
    """One graph, or several side by side with the graph of each node in ``batch``: what PyG calls Data and Batch."""

    def __init__(self, x, edge_index, y, batch=None):
        self.x, self.edge_index, self.y, self.batch = x, edge_index, y, batch

    @property
    def num_graphs(self):
        return len(self.y)

    def to(self, device, non_blocking=False):
        for name, value in vars(self).items():
            setattr(self, name, value if value is None else value.to(device, non_blocking=non_blocking))
        return self

    @classmethod
    def from_data_list(cls, graphs):
        sizes = torch.tensor([len(graph.x) for graph in graphs])
        offsets = sizes.cumsum(0) - sizes
        edges = [graph.edge_index + offset for graph, offset in zip(graphs, offsets, strict=True)]
        return cls(
            torch.cat([graph.x for graph in graphs]),
            torch.cat(edges, dim=1),
            torch.cat([graph.y for graph in graphs]),
            torch.arange(len(graphs)).repeat_interleave(sizes),
        )


def graphs():
    generator = torch.Generator().manual_seed(3)
    result = []
    for index in range(32):
        nodes, label = 5 + index % 4, index % 2
        edge_index = torch.randint(0, nodes, (2, nodes * (2 + 2 * label)), generator=generator)
        result.append(Data(torch.randn(nodes, 4, generator=generator), edge_index, torch.tensor([label])))
    return result


class GCN(nn.Module):
    def __init__(self, hidden_channels=16):
        super().__init__()
        self.conv1, self.conv2 = nn.Linear(4, hidden_channels), nn.Linear(hidden_channels, hidden_channels)
        self.lin = nn.Linear(hidden_channels, 2)

    def forward(self, x, edge_index, batch, num_graphs):
        x = self.propagate(self.conv1(x), edge_index).relu()
        x = self.propagate(self.conv2(x), edge_index)
        pooled = x.new_zeros(num_graphs, x.shape[1]).index_add_(0, batch, x)
        pooled = pooled / torch.bincount(batch, minlength=num_graphs).unsqueeze(1)
        return self.lin(pooled)

    @staticmethod
    def propagate(x, edge_index):
        return x.index_add(0, edge_index[1], x[edge_index[0]])


def original():
    torch.manual_seed(2)
    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, weight_decay=5e-4)
    losses = []
    for _epoch in range(EPOCHS):
        model.train()
        for data in DataLoader(graphs(), BATCH, collate_fn=Data.from_data_list):
            data = data.to("cpu")
            optimizer.zero_grad()
            out = model(data.x, data.edge_index, data.batch, data.num_graphs)
            loss = F.cross_entropy(out, data.y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model


class GraphClassifier(TrainModule):
    def __init__(self):
        super().__init__()
        self.model = GCN()

    def training_step(self, data, batch_idx):
        out = self.model(data.x, data.edge_index, data.batch, data.num_graphs)
        loss = F.cross_entropy(out, data.y)
        self.log("loss", loss, batch_size=data.num_graphs)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=LR, weight_decay=5e-4)


def ported(**settings):
    seed_everything(2)
    module = GraphClassifier()
    loader = DataLoader(graphs(), BATCH, collate_fn=Data.from_data_list)
    Trainer(max_epochs=EPOCHS, global_batch_size=BATCH, **settings).fit(module, loader)
    return module.model
