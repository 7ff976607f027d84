"""The client: how it trains on its own examples. Everything else is fedhdp's."""

from __future__ import annotations

from flwr.app import Context
from task import MODEL, level, own_examples

from fedhdp.flower.client_app import Trainer, client_app
from fedhdp.flower.config import from_run_config
from fedhdp.flower.trainer import built_in


def trainer(context: Context) -> Trainer:
    """One client's training, with its own examples."""
    mine, training = own_examples(context), from_run_config(context.run_config).training
    return built_in(MODEL, training, mine["train_x"], mine["train_y"], test=(mine["test_x"], mine["test_y"]))


app = client_app(trainer, level)
