"""The same client in PyTorch: only ``fit`` and ``score`` differ. To use it, set in pyproject.toml:

clientapp = "torch_client:app"

The server does not change: it sees arrays of the same names and shapes.
"""

from __future__ import annotations

import torch
from flwr.app import Context
from task import choose_level, load_examples, logits
from torch.nn.functional import cross_entropy

from fedhdp import LocalTraining
from fedhdp.flower import Arrays, Deployment, Trainer, client_app

Tensors = dict[str, torch.Tensor]

torch.seed()  # every message starts a process, whose batches would otherwise be those of the last one


def as_tensors(arrays: Arrays) -> Tensors:
    """Copies of NumPy arrays as tensors."""
    return {name: torch.tensor(array) for name, array in arrays.items()}


def as_arrays(model: Tensors) -> Arrays:
    """Tensors as NumPy arrays."""
    return {name: tensor.detach().numpy() for name, tensor in model.items()}


def sgd_step(model: Tensors, x: torch.Tensor, y: torch.Tensor, rate: float, pull: float, anchor: Tensors) -> Tensors:
    """One SGD step on the loss plus pull/2·‖model − anchor‖²."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in model.items()}
    gradients = torch.autograd.grad(cross_entropy(logits(leaves, x), y), list(leaves.values()))
    return {
        name: (leaf - rate * (gradient + pull * (leaf - anchor[name]))).detach()
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
    }


def torch_trainer(training: LocalTraining, x_N: torch.Tensor, y_N: torch.Tensor, test: tuple | None = None) -> Trainer:
    """How one client trains on its examples."""

    def fit(parameters: Arrays, personal: Arrays, pull: float, round: int) -> tuple[Arrays, Arrays]:
        start, rates = as_tensors(parameters), training.rates(round)
        model, personal_model = dict(start), as_tensors(personal)
        order = torch.randperm(len(y_N))
        for _ in range(training.epochs):
            for batch in order.split(training.batch_size):
                model = sgd_step(model, x_N[batch], y_N[batch], rates[0], 0.0, start)
                personal_model = sgd_step(personal_model, x_N[batch], y_N[batch], rates[1], pull, start)
        return as_arrays(model), as_arrays(personal_model)

    def score(arrays: Arrays) -> float:
        x_T, y_T = test or (x_N, y_N)
        return float((logits(as_tensors(arrays), x_T).argmax(dim=1) == y_T).float().mean())

    return Trainer(fit, score)


def trainer(context: Context) -> Trainer:
    """One client's training, with its own examples."""
    examples, training = load_examples(context), Deployment.from_run_config(context.run_config).training
    x_N, x_T = (torch.tensor(examples[f"{part}_x"]).flatten(1) / 255 for part in ("train", "test"))
    y_N, y_T = (torch.tensor(examples[f"{part}_y"]).long() for part in ("train", "test"))
    return torch_trainer(training, x_N, y_N, (x_T, y_T))


app = client_app(trainer, choose_level)
