"""Training for a plan: a public basis, few local epochs, and a server with momentum. No data is looked at.

The settings are those of the reproduction's rows on a basis. The server's rate follows the noise: with rate η and momentum
0.9 the models wander by about η times the noise of a round, and the rates that did best kept η·noise² the same.
"""

from __future__ import annotations

import msgspec

from fedhdp.theory.planning import Plan

LARGEST_RATE = 0.4  # of the server, with momentum 0.9: above it the model overshoots without noise
RATE_TIMES_NOISE_SQUARED = 1.2e-5  # noise of a round on each parameter, in clips


class SuggestedTraining(msgspec.Struct, frozen=True):
    """What to train with, and what each choice rests on."""

    basis_size: int
    basis_exponent: float
    epochs: int
    learning_rate: float
    personal_learning_rate: float
    server_rate: float
    momentum: float
    average: float
    rests_on: dict[str, str]


def suggest_training(plan: Plan) -> SuggestedTraining:
    """Suggest a basis and training for a plan's FedHDP.

    Args:
        plan: The plan, from `fedhdp.theory.planning.plan`, of the network without a basis.
    """
    noise = plan.error_estimates["fedhdp"].noise_per_parameter
    rate = LARGEST_RATE if noise == 0 else min(LARGEST_RATE, RATE_TIMES_NOISE_SQUARED / noise**2)
    return SuggestedTraining(
        *(64, 0.25, 3, 0.5, 5.0, float(f"{rate:.2g}"), 0.9, 0.99),
        rests_on={
            "basis_size": "MNIST, one seed: 64 and 81 are alike, 49 lose half a point",
            "basis_exponent": "MNIST, one seed: 0 and 0.4 lose half a point or more",
            "epochs": "MNIST, one seed: 1 to 6 are alike",
            "learning_rate": "MNIST, one seed: 0.25 loses half a point",
            "personal_learning_rate": "MNIST, one digit a client: few steps must be large; by writers 1",
            "server_rate": f"the noise of a round on a parameter, {noise:.2g} clips: rate·noise² as on MNIST",
            "momentum": "not varied",
            "average": "the last 100 rounds or so, at no privacy cost",
            "weights": "the theory, for the network without a basis: the optimum is flat",
        },
    )
