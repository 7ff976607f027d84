"""The works' networks in PyTorch, as its users write them, and their parameters in the order and layout of PyTorch."""

from collections.abc import Iterator

import numpy as np
import torch
import work as w
from torch import nn


class Block(nn.Module):
    """A block of a transformer: causal attention and a dense layer, each after a layer norm."""

    def __init__(self, work: w.Sequence) -> None:
        super().__init__()
        self.heads = work.heads
        self.norm_0 = nn.LayerNorm(work.width)
        self.qkv, self.out = nn.Linear(work.width, 3 * work.width), nn.Linear(work.width, work.width)
        self.norm_1 = nn.LayerNorm(work.width)
        self.up, self.down = nn.Linear(work.width, work.hidden), nn.Linear(work.hidden, work.width)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm_0(h)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        h = h + self.out(attended.transpose(1, 2).flatten(2))
        return h + self.down(nn.functional.gelu(self.up(self.norm_1(h)), approximate="tanh"))


class Transformer(nn.Module):
    """The next token's logits for each token."""

    def __init__(self, work: w.Sequence) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(work.vocabulary, work.width), nn.Embedding(work.length, work.width)
        self.blocks = nn.Sequential(*(Block(work) for _ in range(work.blocks)))
        self.norm, self.head = nn.LayerNorm(work.width), nn.Linear(work.width, work.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position.weight)))


def network(work: w.Work) -> nn.Module:
    """The work's network; its parameters are in the order of `Work.shapes`."""
    if isinstance(work, w.Sequence):
        return Transformer(work)
    dense = [nn.ReLU(), nn.Linear(work.hidden, work.classes)]
    if not isinstance(work, w.Femnist):
        return nn.Sequential(nn.Flatten(), nn.Linear(w.INPUTS, work.hidden), *dense)
    first, second = work.channels
    convolutions = [nn.Conv2d(1, first, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    convolutions += [nn.Conv2d(first, second, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    dense.insert(1, nn.Dropout(0.5))
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Dropout(0.25), nn.Linear(work.flat, work.hidden), *dense)


def inputs(work: w.Work, x: torch.Tensor) -> torch.Tensor:
    """Stored examples as the network takes them: images of one channel from 0 to 1, or tokens."""
    return x.long() if isinstance(work, w.Sequence) else x.float().unsqueeze(-3) / 255


def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of examples, or of tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())


def to_torch(work: w.Work, model: w.Parameters) -> list[np.ndarray]:
    """A model's parameters in the layout of PyTorch: outputs before inputs, channels before pixels."""
    return [np.ascontiguousarray(_to_torch(work, name, part)) for name, part in model.items()]


def _to_torch(work: w.Work, name: str, part: np.ndarray) -> np.ndarray:
    if name == "Dense_0/kernel" and isinstance(work, w.Femnist):
        part = part.reshape(-1, work.channels[1], work.hidden).swapaxes(0, 1).reshape(part.shape)
    return np.moveaxis(part, (-1, -2), (0, 1)) if name.endswith("kernel") else part


def from_torch(work: w.Work, arrays: Iterator[np.ndarray]) -> w.Parameters:
    """The parameters that `to_torch` laid out."""
    model = {}
    for (name, shape), array in zip(work.shapes().items(), arrays, strict=True):
        part = np.moveaxis(array, (0, 1), (-1, -2)) if name.endswith("kernel") else array
        if name == "Dense_0/kernel" and isinstance(work, w.Femnist):
            part = part.reshape(work.channels[1], -1, work.hidden).swapaxes(0, 1)
        model[name] = part.reshape(shape)
    return model


def set_parameters(net: nn.Module, arrays: list[np.ndarray]) -> None:
    """Copy arrays into a network's parameters."""
    with torch.no_grad():
        for parameter, array in zip(net.parameters(), arrays, strict=True):
            parameter.copy_(torch.from_numpy(array))


def get_model(work: w.Work, net: nn.Module) -> w.Parameters:
    """A network's parameters by name."""
    return from_torch(work, (parameter.detach().numpy() for parameter in net.parameters()))


def clients(work: w.Work, data: w.Data) -> tuple[torch.Tensor, torch.Tensor]:
    """Every client's examples as they are stored."""
    return torch.from_numpy(data.x_KM), torch.from_numpy(data.y_KM).long()


def train(work: w.Work, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> int:
    """Train a network on a client's examples: fused gradient descent on the same batches in every epoch.

    Returns:
        The number of gradient steps.
    """
    optimizer = torch.optim.SGD(net.parameters(), lr=work.learning_rate, fused=True)
    order = torch.randperm(len(x))
    batches = list(zip(inputs(work, x[order]).split(work.batch), y[order].split(work.batch), strict=True))
    for _ in range(work.epochs):
        for x_B, y_B in batches:
            optimizer.zero_grad()
            loss(net(x_B), y_B).backward()
            optimizer.step()
    return work.epochs * len(batches)
