"""Canaries in a real run: some clients train on noise, and an attacker who sees the released models tells who took part.

The attacker knows what a canary's data is, so it trains from each released model as the canary would, and looks for the
canary's update in the next model. It knows neither who was sampled nor what others sent. The scores of one run depend on
each other through the models; the one-run bound holds for them nevertheless.

Axis letters: K clients, C canaries, M examples of a canary, G groups, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from msgspec.structs import replace

from fedhdp.client import LocalTraining, scale_inputs
from fedhdp.data import Examples, FederatedData
from fedhdp.engine.chunk import train_clients
from fedhdp.errors import DataError, require
from fedhdp.experiments.bases import build_model
from fedhdp.experiments.config import Experiment
from fedhdp.mechanism import ScheduledMechanism, mechanism_at
from fedhdp.models import Model
from fedhdp.privacy.audit.bounds import Scores
from fedhdp.privacy.audit.canaries import Integers, Progress, evidence
from fedhdp.simulation import Simulation

MAX_SHARE = 0.5  # of a group's clients that may become canaries
CHUNK = 16  # canaries that train at a time


class CanarySimulation(Simulation):
    """A simulation in which some clients never take part: to the others and to the server it is as if they were not there.

    Attributes:
        absent: The numbers of these clients.
    """

    absent: Integers

    def draw_cohort(self, round: int) -> np.ndarray:
        """The clients sampled in a round, less those who are absent."""
        cohort = super().draw_cohort(round)
        return cohort[~np.isin(cohort, self.absent)]


def audit_training(
    experiment: Experiment,
    number: int,
    schedule: ScheduledMechanism,
    canaries: int,
    rng: np.random.Generator,
    progress: Progress | None = None,
) -> list[Scores]:
    """Train with canaries, and score each by the released models.

    Args:
        experiment: The experiment.
        number: The number of the variant.
        schedule: The variant's mechanism, or that of each round.
        canaries: How many clients of each group are canaries; at most half of the group.
        rng: The generator of the canaries' data and coins.
        progress: Called after each round.

    Returns:
        The scores of each group.

    Raises:
        DataError: If the data is not in memory, so that clients' examples cannot be replaced.
    """
    data = experiment.load_data()
    training, optimizer = experiment.overrides(number)
    require(optimizer.optimizer is None, "server.optimizer", optimizer.optimizer, "none where training is audited")
    with TemporaryDirectory() as directory:
        model, data = build_model(experiment, data, Path(directory))
    training = _without_personal(training)
    names = [group.name for group in mechanism_at(schedule, 0).groups]
    group_K = data.level_indices(names)
    canary_C = _choose(group_K, len(names), canaries, rng)
    coin_C = rng.random(len(canary_C)) < 0.5
    data = _with_noise(data, canary_C, rng)
    simulation = CanarySimulation(data, model, schedule, training, optimizer, experiment.seed)
    simulation.absent = canary_C[~coin_C]
    attacker = _Attacker(simulation, canary_C, progress, experiment.rounds)
    simulation.run(experiment.rounds, before_round=attacker.before_round, on_round=attacker.after_round)
    return [
        Scores(attacker.score_C[in_group & ~coin_C], attacker.score_C[in_group & coin_C])
        for in_group in (group_K[canary_C] == group for group in range(len(names)))
    ]


def _without_personal(training: LocalTraining) -> LocalTraining:
    """The same training without personal models, which never reach the server."""
    return replace(training, personalize=False, personal_learning_rate=None, personal_epochs=None)


def _choose(group_K: np.ndarray, groups: int, canaries: int, rng: np.random.Generator) -> Integers:
    """So many clients of each group at random."""
    chosen = []
    for group in range(groups):
        members = np.flatnonzero(group_K == group)
        chosen.append(rng.permutation(members)[: min(canaries, int(MAX_SHARE * len(members)))])
    return np.sort(np.concatenate(chosen))


def _with_noise(data: FederatedData, canary_C: Integers, rng: np.random.Generator) -> FederatedData:
    """The data in which the canaries' inputs are noise, unlike anyone's, of the type and size of their own examples."""
    train = data.train
    if not isinstance(train, Examples):
        raise DataError("the training of data that is not in memory cannot be audited", "data", data.name)
    x_N, y_N = np.array(train.x_N), np.array(train.y_N)
    low, high = (float(end(x_N)) for end in (np.min, np.max))
    for canary in canary_C:
        rows = slice(int(train.start_K[canary]), int(train.start_K[canary] + train.count_K[canary]))
        noise = rng.uniform(low, high, x_N.shape[1:])  # one input for all examples: one strong direction
        x_N[rows] = noise.astype(x_N.dtype)
        y_N[rows] = y_N[rng.integers(len(y_N))]
    return data._replace(train=train._replace(x_N=x_N, y_N=y_N))


class _Attacker:
    """Scores each canary by every released model."""

    def __init__(self, simulation: Simulation, canary_C: Integers, progress: Progress | None, rounds: int):
        self.canary_C, self.score_C = canary_C, np.zeros(len(canary_C))
        self._progress, self._rounds = progress, rounds
        data = simulation.data
        self._train: Callable[..., Any] = _compile(simulation.engine.model, simulation.training, data.input_scale)
        self._layers = simulation.engine.config.layers
        count = int(data.train.count_K[canary_C].min())  # of examples that the attacker trains with: all are alike
        train = data.template
        index_CM = train.start_K[canary_C][:, None] + np.arange(count)
        self._x_CM, self._y_CM = train.x_N[index_CM], train.y_N[index_CM]

    def before_round(self, simulation: Simulation) -> None:
        """Remember what has been released."""
        self._model, self._clip = simulation.global_model(), np.asarray(simulation.server_state.clip[0])

    def after_round(self, simulation: Simulation) -> None:
        """Look for each canary's update in what the model moved by."""
        mechanism, round = simulation.mechanism, simulation.round - 1
        step_P = (simulation.global_model() - self._model) * mechanism.expected_weight
        clip_P = self._clip if self._layers is None else np.asarray(self._layers.by_parameter(jnp.asarray(self._clip)))
        step_P = step_P / clip_P
        rates, theta = (
            jnp.array(simulation.training.rates(round), jnp.float32),
            simulation.engine.unravel(jnp.asarray(self._model)),
        )
        for start in range(0, len(self.canary_C), CHUNK):
            part = slice(start, start + CHUNK)
            update_CP = np.asarray(self._train(theta, *_padded(self._x_CM[part], self._y_CM[part]), rates))
            update_CP = update_CP[: len(self.canary_C[part])] / clip_P
            self._score(part, update_CP, step_P, simulation)
        if self._progress is not None:
            self._progress(simulation.round, self._rounds)

    def _score(self, part: slice, update_CP: np.ndarray, step_P: np.ndarray, simulation: Simulation) -> None:
        mechanism, group_C = simulation.mechanism, simulation.group_K[self.canary_C[part]]
        norm_C = np.linalg.norm(update_CP, axis=1)
        along_C = update_CP @ step_P / np.maximum(norm_C, 1e-30)  # in clips
        stddev = mechanism.update_noise_stddev
        spread = max(
            stddev, float(np.linalg.norm(step_P)) / np.sqrt(len(step_P)), 1e-9
        )  # others' updates are noise too
        for number, group in enumerate(mechanism.groups):
            in_group = group_C == number
            rate = mechanism.sampling_probability(group)
            if rate == 0 or not in_group.any():
                continue
            size = group.weight / spread * float(np.mean(np.minimum(norm_C[in_group], mechanism.clip_l2_norm)))
            scores = evidence(along_C[in_group] / spread, size, rate, is_fixed=False)
            self.score_C[np.arange(len(self.score_C))[part][in_group]] += scores


def _padded(x_CM: np.ndarray, y_CM: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The canaries of a whole chunk, the first again where some are missing."""
    index_C = np.resize(np.arange(len(y_CM)), CHUNK)
    return x_CM[index_C], y_CM[index_C]


def _compile(model: Model, training: LocalTraining, input_scale: float | None) -> Callable[..., Any]:
    """The local training of some clients from one model, as a compiled function that returns update_CP."""

    def train(theta: Any, x_CM: Any, y_CM: Any, rates: Any) -> Any:
        key_C = jax.random.split(jax.random.key(0), len(y_CM))
        update_C, _ = train_clients(model, training, theta, scale_inputs(x_CM, input_scale), y_CM, key_C, rates)
        return jax.vmap(lambda update: ravel_pytree(update)[0])(update_C)

    return jax.jit(train)
