"""The simulator as an audit sees it: the noise of its rounds, over devices and runs, and canaries in its training.

Axis letters: T rounds, R runs, P parameters.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from msgspec.structs import replace

from fedhdp.client import LocalTraining
from fedhdp.data import FederatedData
from fedhdp.mechanism import Mechanism
from fedhdp.models import linear
from fedhdp.privacy.audit import meter
from fedhdp.privacy.audit.meter import Check
from fedhdp.simulation import Simulation

INPUTS, CLASSES = 1023, 2  # so that the number of parameters is divided among any common number of devices
ROUNDS, CLIENTS = 16, 50  # of the metered simulation, and of each of its groups


def simulator_checks(mechanism: Mechanism) -> list[Check]:
    """The noise of the simulator's rounds, under a mechanism with the same noise multipliers and weights.

    Two runs train side by side on all devices, with updates too small to be seen. So the released models move by noise
    alone.

    Args:
        mechanism: The mechanism. The metered one has fewer clients and a fixed clip.
    """
    groups = tuple(replace(group, clients=CLIENTS, sampling_rate=0.1, pull=0.0) for group in mechanism.groups)
    metered = replace(mechanism, groups=groups, clip=1.0)
    if metered.update_noise_stddev == 0 or metered.expected_weight == 0:
        return []
    doubled = replace(metered, groups=tuple(replace(group, weight=2 * group.weight) for group in groups))
    noise_RTP = np.stack(_released([metered, doubled]))
    checks = [
        meter.variance_check(noise_RTP, "simulator: noise variance"),
        meter.correlation_check(
            noise_RTP.reshape(-1, noise_RTP.shape[-1]), "simulator: rounds and runs", "rounds and runs"
        ),
        meter.device_check(noise_RTP.reshape(-1, noise_RTP.shape[-1])),
    ]
    return [*checks[:2], replace(checks[2], name="simulator: devices")]


def _released(mechanisms: list[Mechanism]) -> list[np.ndarray]:
    """The noise of each run's rounds, in its standard deviations: what the released models move by."""
    clients = sum(group.clients for group in mechanisms[0].groups)
    levels = np.repeat([group.name for group in mechanisms[0].groups], CLIENTS)
    x_N = np.zeros((clients, INPUTS), np.float32)
    y_N, client_N = np.arange(clients) % CLASSES, np.arange(clients)
    level_of = dict(zip(client_N.tolist(), levels.tolist(), strict=True))
    data = FederatedData.from_arrays(x_N, y_N, client_N, level_of, test=None, classes=CLASSES)
    model = linear(INPUTS, CLASSES)
    training = LocalTraining(epochs=1, learning_rate=1e-30, personalize=False)
    zeros = jax.tree.map(jnp.zeros_like, model.init(jax.random.key(0)))
    simulation = Simulation(data, model, mechanisms, training, initial_model=zeros)
    models_R: list[list[np.ndarray]] = [[simulation.global_model(number)] for number in range(len(mechanisms))]

    def keep(simulation: Simulation) -> None:
        for number, models in enumerate(models_R):
            models.append(simulation.global_model(number))

    simulation.run(ROUNDS, on_round=keep)
    scales = [mechanism.expected_weight / mechanism.update_noise_stddev for mechanism in mechanisms]
    return [
        np.diff(np.array(models, np.float64), axis=0) * scale for models, scale in zip(models_R, scales, strict=True)
    ]
