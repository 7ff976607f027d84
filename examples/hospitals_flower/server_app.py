"""The server's side: the initial model. It has no patients, so it measures nothing itself."""

from __future__ import annotations

import torch
from task import new_model

from fedhdp.flower import Arrays, Deployment, server_app


def initial_arrays(deployment: Deployment) -> Arrays:
    """The network's initial parameters."""
    torch.manual_seed(deployment.seed)
    return {name: parameter.detach().numpy() for name, parameter in new_model().named_parameters()}


app = server_app(initial_arrays)
