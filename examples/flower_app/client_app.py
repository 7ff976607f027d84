"""The client: how it trains on its own examples."""

from __future__ import annotations

from flwr.app import Context
from task import INPUT_SCALE, MODEL, choose_level, load_examples

from fedhdp.flower import Deployment, Trainer, client_app, jax_trainer


def trainer(context: Context) -> Trainer:
    """One client's training, with its own examples."""
    examples, training = load_examples(context), Deployment.from_run_config(context.run_config).training
    test = examples["test_x"], examples["test_y"]
    train = examples["train_x"], examples["train_y"]
    return jax_trainer(MODEL, training, *train, test=test, input_scale=INPUT_SCALE)


app = client_app(trainer, choose_level)
