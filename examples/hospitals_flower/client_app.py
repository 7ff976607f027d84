"""The hospital's side: how it trains in PyTorch, and how it measures its models."""

from __future__ import annotations

import torch
from flwr.app import Context
from task import Patients, choose_level, load_patients, new_model
from torch.nn.functional import cross_entropy

from fedhdp.flower import Arrays, Trainer, client_app

torch.seed()  # every message starts a process, whose batches would otherwise be those of the last one


def train(arrays: Arrays, anchor: Arrays, pull: float, patients: Patients, epochs: int, rate: float) -> Arrays:
    """Train a model on the loss plus pull/2·‖model − anchor‖²."""
    model, (x_N, y_N) = load_model(arrays), patients
    anchors = [torch.tensor(array) for array in anchor.values()]
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(epochs):
        for batch in torch.randperm(len(y_N)).split(8):
            distance = sum((p - a).square().sum() for p, a in zip(model.parameters(), anchors, strict=True))
            optimizer.zero_grad()
            (cross_entropy(model(x_N[batch]), y_N[batch]) + pull / 2 * distance).backward()
            optimizer.step()
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def load_model(arrays: Arrays) -> torch.nn.Module:
    """The network with these parameters."""
    model = new_model()
    model.load_state_dict({name: torch.tensor(array) for name, array in arrays.items()})
    return model


@torch.no_grad()
def score(arrays: Arrays, patients: Patients) -> dict[str, float]:
    """The accuracy, and the AUC: how often a malignant tumor ranks above a benign one; NaN without both kinds."""
    x_N, y_N = patients
    logits_NL = load_model(arrays)(x_N)
    risk_N = logits_NL[:, 1] - logits_NL[:, 0]
    differences = risk_N[y_N == 1][:, None] - risk_N[y_N == 0]
    auc = (differences.sign() + 1).mean() / 2
    return {"auc": float(auc), "accuracy": float((logits_NL.argmax(dim=1) == y_N).float().mean())}


def trainer(context: Context) -> Trainer:
    """One hospital's training, of the global model and of its personal one."""
    patients, test_patients = load_patients(context)
    settings = patients, int(context.run_config["app.epochs"]), float(context.run_config["app.learning-rate"])

    def fit(parameters: Arrays, personal: Arrays, pull: float, round: int) -> tuple[Arrays, Arrays]:
        return train(parameters, parameters, 0.0, *settings), train(personal, parameters, pull, *settings)

    return Trainer(fit, lambda arrays: score(arrays, test_patients))


app = client_app(trainer, choose_level)
