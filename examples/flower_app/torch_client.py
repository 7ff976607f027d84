"""The same client in PyTorch: only ``fit`` and ``score`` differ. To use it, in pyproject.toml:

clientapp = "torch_client:app"

The server neither knows nor cares: it sees arrays of the same names and shapes.
"""

from __future__ import annotations

import torch
from flwr.app import Context
from task import level, logits, own_examples
from torch.nn.functional import cross_entropy

from fedhdp.client import LocalTraining
from fedhdp.flower.client_app import Trainer, client_app
from fedhdp.flower.config import from_run_config
from fedhdp.flower.protocol import Arrays

Tensors = dict[str, torch.Tensor]


def as_tensors(arrays: Arrays) -> Tensors:
    """NumPy arrays as tensors of their own."""
    return {name: torch.tensor(array) for name, array in arrays.items()}


def as_arrays(model: Tensors) -> Arrays:
    """Tensors as NumPy arrays."""
    return {name: tensor.detach().numpy() for name, tensor in model.items()}


def step(model: Tensors, x: torch.Tensor, y: torch.Tensor, rate: float, pull: float, towards: Tensors) -> Tensors:
    """One step of gradient descent on the loss and, for a personal model, on pull/2·‖model − towards‖²."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in model.items()}
    gradients = torch.autograd.grad(cross_entropy(logits(leaves, x), y), list(leaves.values()))
    pairs = zip(leaves.items(), gradients)
    return {
        name: (leaf - rate * (gradient + pull * (leaf - towards[name]))).detach() for (name, leaf), gradient in pairs
    }


def torch_trainer(training: LocalTraining, x_N: torch.Tensor, y_N: torch.Tensor, test: tuple | None = None) -> Trainer:
    """How one client trains on its examples."""

    def fit(parameters: Arrays, personal: Arrays, pull: float, round: int) -> tuple[Arrays, Arrays]:
        start, rates = as_tensors(parameters), training.rates(round)
        model, own = dict(start), as_tensors(personal)
        order = torch.randperm(len(y_N))
        for _ in range(training.epochs):
            for batch in order.split(training.batch_size):
                model = step(model, x_N[batch], y_N[batch], rates[0], 0.0, start)
                own = step(own, x_N[batch], y_N[batch], rates[1], pull, start)
        return as_arrays(model), as_arrays(own)

    def score(arrays: Arrays) -> float:
        x_T, y_T = test or (x_N, y_N)
        return float((logits(as_tensors(arrays), x_T).argmax(dim=1) == y_T).float().mean())

    return Trainer(fit, score)


def trainer(context: Context) -> Trainer:
    """One client's training, with its own examples."""
    mine, training = own_examples(context), from_run_config(context.run_config).training
    x_N, x_T = (torch.tensor(mine[f"{part}_x"]).flatten(1) / 255 for part in ("train", "test"))
    y_N, y_T = (torch.tensor(mine[f"{part}_y"]).long() for part in ("train", "test"))
    return torch_trainer(training, x_N, y_N, (x_T, y_T))


app = client_app(trainer, level)
