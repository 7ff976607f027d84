"""How good models are: on the server's test set, on the clients' own examples, and as each client would choose.

Axis letters: K clients of the population, C slots, R global models, V personal models, T both, N examples, P parameters.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from fedhdp.data import Examples, FederatedData
from fedhdp.engine.examples import ShardedExamples
from fedhdp.engine.personal_store import MemoryMappedPersonalModels, ShardedPersonalModels
from fedhdp.engine.placement import assign_slots, make_slot_table, partition_by_owner
from fedhdp.engine.round import Engine
from fedhdp.models import Array

AT_ONCE = 1024  # clients whose personal models are read from a file for one evaluation


class Evaluation:
    """A population's test sets on the devices, and what models score on them."""

    def __init__(
        self,
        engine: Engine,
        population: FederatedData,
        group_K: np.ndarray,
        store: ShardedPersonalModels | MemoryMappedPersonalModels | None,
    ):
        self.engine, self.population, self.group_K, self.store = engine, population, group_K, store

    @cached_property
    def _server_test(self) -> tuple[Array, Array]:
        x_N, y_N = self.population.server_x_N, self.population.server_y_N
        spare = -len(y_N) % self.engine.devices
        wrapped = tuple(np.resize(a, (len(a) + spare, *a.shape[1:])) for a in (x_N, y_N))
        return self.engine.put(wrapped, self.engine.by_client)

    @cached_property
    def _test(self) -> ShardedExamples:
        return ShardedExamples(self.engine, self.population.test)

    @cached_property
    def _validation(self) -> ShardedExamples:
        assert self.population.validation is not None
        return ShardedExamples(self.engine, self.population.validation)

    def on_server(self, theta_RP: Array) -> np.ndarray:
        """The mean score of each global model; without a test set it is no number."""
        if len(self.population.server_y_N) == 0:
            return np.full(theta_RP.shape[0], np.nan)
        score_NR = self.engine.fetch(self.engine.scores(theta_RP, *self._server_test))
        return score_NR[: len(self.population.server_y_N)].mean(axis=0)

    def on_clients(self, theta_RP: Array, personal: Any, uninitialized_K: np.ndarray) -> np.ndarray:
        """Each client's mean score on its test examples: by every global model, then by its personal ones if given."""
        return self._scores(theta_RP, personal, uninitialized_K, self._test, self.population.test)

    def on_held_out(self, theta_RP: Array, personal: Any, uninitialized_K: np.ndarray) -> np.ndarray:
        """The same on what clients hold out."""
        assert self.population.validation is not None
        return self._scores(theta_RP, personal, uninitialized_K, self._validation, self.population.validation)

    def _scores(
        self, theta_RP: Array, personal: Any, uninitialized_K: np.ndarray, kept: ShardedExamples, examples: Examples
    ) -> np.ndarray:
        asked, models = np.flatnonzero(examples.count_K), theta_RP.shape[0]
        models += 0 if personal is None else len(self.engine.run_V)
        score_KT = np.full((self.population.num_clients, models), np.nan)  # without examples there is no score
        at_once = AT_ONCE if isinstance(self.store, MemoryMappedPersonalModels) else max(len(asked), 1)
        for first in range(0, len(asked), at_once):
            shares = partition_by_owner(self.engine, asked[first : first + at_once])
            seats = assign_slots(shares, self.engine.padded_cohort_size(max(map(len, shares))))
            x_N, y_N, start_C = kept.fetch(seats)
            lent, row_C = None, seats.place_C
            if self.store is not None and personal is not None:
                lent, row_C = self.store.checkout(personal, seats)
            table = make_slot_table(self.engine, seats, self.group_K, start_C, examples.count_K, row_C, uninitialized_K)
            most = int(examples.count_K.max())
            score_CT = self.engine.fetch(self.engine.client_scores(most, theta_RP, lent, x_N, y_N, table))
            score_KT[seats.client_C[seats.is_participating_C]] = score_CT[seats.is_participating_C]
            if self.store is not None and lent is not None:
                self.store.release(lent)
        return score_KT


def chosen(run_of: list[int], held_out_KV: np.ndarray, score_KV: np.ndarray) -> np.ndarray:
    """The scores when each client takes, among the pulls of a run, the first that is best on what it held out."""
    chosen_KV, run_V = np.empty_like(score_KV), np.array(run_of)
    for run in set(run_of):
        mine = np.flatnonzero(run_V == run)
        best_K = mine[np.nan_to_num(held_out_KV[:, mine], nan=-np.inf).argmax(axis=1)]
        chosen_KV[:, mine] = score_KV[np.arange(len(score_KV)), best_K][:, None]
    return chosen_KV
