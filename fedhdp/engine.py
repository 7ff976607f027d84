"""One round on many devices: a cohort's clients, a chunk at a time on each device, through client.py and server.py.

Cores are devices (``fedhdp/__init__.py`` asks JAX for one each): a mesh with the single axis ``clients``, few clients at
a time on each device, so that what a client computes with stays in its core's cache. The same mesh is the GPUs of a
host. Personal models stay where they are: client k lives on device k mod D, trains there, and only the sums of updates
cross devices. A cohort is padded to a capacity that rarely changes, so a round compiles once; how many chunks are run
follows who came.

Axis letters: K clients of the population, C slots of the cohort, M examples of one client (padded), P parameters.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedhdp.client import LocalTraining, as_floats, client_updates, coordinates, flatten
from fedhdp.mechanism import Terms
from fedhdp.models import Array, Model
from fedhdp.population import Population
from fedhdp.server import ServerState, ServerStep, Sums, clip_and_sum, finish_round

AXIS = "clients"


class Cohort(NamedTuple):
    """The clients of a round with their examples, each on the device where it lives; spare slots have not ``came``."""

    x_CM: np.ndarray
    y_CM: np.ndarray
    count_C: np.ndarray
    client_C: np.ndarray
    group_C: np.ndarray
    came_C: np.ndarray
    row_C: np.ndarray  # where the client's personal model is, on its device
    new_C: np.ndarray  # it has none yet


class Engine:
    """A compiled round for one model and one way of training."""

    def __init__(
        self, model: Model, training: LocalTraining, server: ServerStep, inputs: int, chunk: int | None = None
    ):
        self.model, self.training, self.server, self.inputs = model, training, server, inputs
        self.mesh = Mesh(np.array(jax.devices()), (AXIS,))
        self.devices = len(self.mesh.devices)
        on_gpu = jax.default_backend() == "gpu"
        # A core's cache holds few clients; a GPU wants many, and all of them where a client's steps are small.
        self.chunk = chunk or (8 if not on_gpu else 256 if model.head is not None else 32)
        self.by_client = NamedSharding(self.mesh, PartitionSpec(AXIS))
        self.everywhere = NamedSharding(self.mesh, PartitionSpec())
        start, self.unravel = ravel_pytree(jax.tree.map(jnp.zeros_like, jax.eval_shape(model.init, jax.random.key(0))))
        self.parameters = start.size
        graphs = {"xla_gpu_graph_min_graph_size": 1} if on_gpu else None  # many small kernels, launched as one
        self.round = jax.jit(self._round, static_argnums=0, donate_argnums=(1, 3), compiler_options=graphs)
        self._room = jax.jit(jnp.zeros, static_argnums=0, out_shardings=self.by_client)
        self.scores = jax.jit(self._scores)
        self.personal_scores = jax.jit(self._personal_scores)

    def slots(self, clients_each: int) -> int:
        """The capacity for this many clients on each device: whole chunks, none larger than need be."""
        clients_each = max(clients_each, 1)
        chunks = -(-clients_each // self.chunk)
        return chunks * -(-clients_each // (8 * chunks)) * 8 * self.devices

    def no_personal_models(self, clients: int) -> Array:
        """Room for every client's personal model, on the device where the client lives."""
        return self._room((-(-clients // self.devices) * self.devices, self.parameters))

    def gather(
        self, population: Population, group_K: np.ndarray, new_K: np.ndarray, clients: np.ndarray, slots: int
    ) -> Cohort:
        """These clients with their examples; on each device those with most examples first, so that chunks are alike."""
        train, each = population.train, slots // self.devices
        clients = clients[np.argsort(-train.count_K[clients], kind="stable")]
        at_home = [clients[clients % self.devices == device] for device in range(self.devices)]
        client_C = np.concatenate([np.pad(mine, (0, each - len(mine))) for mine in at_home]).astype(np.int32)
        came_C = np.concatenate([np.arange(each) < len(mine) for mine in at_home])
        most, batch = int(train.count_K.max()), self.training.batch_size
        x_CM, y_CM = train.take(client_C, most if train.alike else -(-most // batch) * batch)
        count_C = np.where(came_C, train.count_K[client_C], 0).astype(np.int32)
        spare_C = len(group_K) + np.arange(slots)  # out of bounds, so that nothing is written
        row_C = np.where(came_C, client_C // self.devices, spare_C).astype(np.int32)
        return Cohort(x_CM, y_CM, count_C, client_C, group_K[client_C], came_C, row_C, new_K[client_C])

    def _round(
        self,
        full: bool,
        state: ServerState,
        cohort: Cohort,
        personal_KP: Array | None,
        terms: Terms,
        rates: tuple[Array, Array],
        batch_key: Array,
        noise_key: Array,
    ) -> tuple[ServerState, Array | None]:
        """One round of Algorithm 1."""
        batch_key, noise_key = jax.random.wrap_key_data(batch_key), jax.random.wrap_key_data(noise_key)
        by_client, everywhere = PartitionSpec(AXIS), PartitionSpec()
        spread = jax.shard_map(
            partial(self._on_device, full),
            mesh=self.mesh,
            in_specs=(everywhere, everywhere, everywhere, by_client, by_client, everywhere, everywhere),
            out_specs=(everywhere, by_client),
            check_vma=False,
        )
        sums, personal_KP = spread(state.theta_P, state.clip, terms, cohort, personal_KP, rates, batch_key)
        return finish_round(self.server, terms, state, sums, noise_key), personal_KP

    def _on_device(
        self,
        full: bool,
        theta_P: Array,
        clip: Array,
        terms: Terms,
        cohort: Cohort,
        personal_KP: Array | None,
        rates: tuple[Array, Array],
        key: Array,
    ) -> tuple[Sums, Array | None]:
        """The device's share of the cohort, chunk by chunk: updates summed, personal models moved."""
        theta = self.unravel(theta_P)
        slots = cohort.came_C.shape[0]
        chunk = slots // -(-slots // self.chunk)
        held_in = coordinates(self.model, cohort.x_CM.shape[1], self.inputs)

        def of_chunk(number: Array, carry: tuple[Sums, Array | None]) -> tuple[Sums, Array | None]:
            sums, personal_KP = carry
            mine = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, number * chunk, chunk), cohort)
            own_C = None
            if personal_KP is not None:  # theta_j ← theta, if not initialised
                own_C = jax.vmap(self.unravel)(jnp.where(mine.new_C[:, None], theta_P, personal_KP[mine.row_C]))
            update_C, own_C = client_updates(
                self.model,
                self.training,
                theta,
                own_C,
                mine.x_CM,
                mine.y_CM,
                mine.count_C,
                terms.pull_G[mine.group_C],
                jax.vmap(partial(jax.random.fold_in, key))(mine.client_C),
                rates,
                held_in,
                full,
            )
            here = clip_and_sum(terms, clip, flatten(update_C), mine.group_C, mine.came_C)
            if personal_KP is not None:
                personal_KP = personal_KP.at[mine.row_C].set(flatten(own_C), mode="drop", unique_indices=True)
            return jax.tree.map(jnp.add, sums, here), personal_KP

        nobody_G = jnp.zeros(terms.weight_G.shape, jnp.int32)
        nothing = Sums(jnp.zeros_like(theta_P), jnp.float32(0), nobody_G)
        chunks = -(-jnp.sum(cohort.came_C) // chunk)
        sums, personal_KP = jax.lax.fori_loop(0, chunks, of_chunk, (nothing, personal_KP))
        return jax.lax.psum(sums, AXIS), personal_KP

    def _scores(self, theta_P: Array, x_N: Array, y_N: Array) -> Array:
        """The score of one model on each example, spread over the devices."""
        theta = self.unravel(theta_P)

        def on_device(x_N: Array, y_N: Array) -> Array:
            def of_one(example: tuple[Array, Array]) -> Array:
                x, y = example
                return self.model.score(self.model.apply(theta, as_floats(x)[None], None), y[None])[0]

            return jax.lax.map(of_one, (x_N, y_N), batch_size=256)

        by_client = PartitionSpec(AXIS)
        return jax.shard_map(on_device, mesh=self.mesh, in_specs=(by_client, by_client), out_specs=by_client)(x_N, y_N)

    def _personal_scores(
        self, theta_P: Array, personal_KP: Array, new_K: Array, x_KM: Array, y_KM: Array, count_K: Array
    ) -> Array:
        """The mean score of each client's personal model on its own examples; a new client has the global model."""

        def on_device(personal_KP: Array, new_K: Array, x_KM: Array, y_KM: Array, count_K: Array) -> Array:
            def of_one(client: tuple[Array, ...]) -> Array:
                own_P, new, x_M, y_M, count = client
                own = self.unravel(jnp.where(new, theta_P, own_P))
                score_M = self.model.score(self.model.apply(own, as_floats(x_M), None), y_M)
                return jnp.sum(jnp.where(jnp.arange(len(y_M)) < count, score_M, 0.0)) / jnp.maximum(count, 1)

            return jax.lax.map(of_one, (personal_KP, new_K, x_KM, y_KM, count_K), batch_size=self.chunk)

        by_client = PartitionSpec(AXIS)
        spread = jax.shard_map(on_device, mesh=self.mesh, in_specs=(by_client,) * 5, out_specs=by_client)
        return spread(personal_KP, new_K, x_KM, y_KM, count_K)
