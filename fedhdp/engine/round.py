"""One round on many devices: a cohort's clients, a chunk at a time on each device, through client.py and server.py.

Cores are devices (``fedhdp/__init__.py`` asks JAX for one each): a mesh with the single axis ``clients``, few clients at
a time on each device, so that what a client computes with stays in its core's cache. The same mesh is the GPUs of a host,
or of several hosts under ``jax.distributed``. Client k lives on device k mod D: its examples and its personal models are
there, it trains there, and only the sums of updates cross devices. A cohort is padded to a capacity that rarely changes,
so a round compiles once; how many chunks are run, and at which of a few sizes, follows who came.

Several runs that draw the same cohorts are one program: R global models, V personal ones, each pulled towards the global
model ``run_V[v]``. What depends on the examples alone is then computed once for all.

Axis letters: K clients of the population, C slots of the cohort, R global models, V personal models, G groups, N examples
on a device, M examples of one client (padded), P parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedhdp.client import Clients, LocalTraining, as_floats, client_updates, coordinates, orders
from fedhdp.engine.low_rank import gram
from fedhdp.mechanism import RoundParams
from fedhdp.models import Array, Model, Parameters
from fedhdp.server import Optimizer, ServerState, Sums, Updates, clip_and_sum, finish_round

AXIS = "clients"
BY_CLIENT, EVERYWHERE = PartitionSpec(AXIS), PartitionSpec()


class Shape(NamedTuple):
    """What of an engine is fixed when it is compiled, besides model, training and server step."""

    inputs: int  # numbers of one example
    sizes: tuple[int, ...]  # capacities at which clients are trained, each at the smallest that holds it
    full: bool  # all clients fill the only capacity
    replicated: bool  # all examples are on all devices
    run_V: tuple[int, ...]  # the global model of each personal one
    runs: int = 1


class SlotTable(NamedTuple):
    """Who is asked, slot by slot, and where on its device what it needs is; travels as one table of integers."""

    client_C: Any
    group_C: Any
    start_C: Any  # its first example
    count_C: Any  # how many it has
    row_C: Any  # its personal models; out of bounds for nobody
    is_participating_C: Any  # 1: somebody is here
    uninitialized_C: Any  # 1: it has no personal models yet


class Data(NamedTuple):
    """The examples that a round may need, one after the other."""

    x_N: Any
    y_N: Any
    gram_K: Any = None  # each client's products with each other, where they are kept


class RoundParamsBatch(NamedTuple):
    """What the mechanisms say, for every round."""

    terms_R: RoundParams
    pull_VG: Any


class Asked(NamedTuple):
    """What a round sends to every device."""

    theta_R: Parameters
    clip_R: Array
    numbers: RoundParamsBatch
    rates: Array
    key: Array  # of the batches


class Engine:
    """A compiled round for one model, one way of training and one shape of the data."""

    def __init__(self, model: Model, training: LocalTraining, server: Optimizer, shape: Shape):
        self.model, self.training, self.server, self.shape = model, training, server, shape
        self.run_V = np.array(shape.run_V, int)
        self.mesh = Mesh(np.array(jax.devices()), (AXIS,))
        self.devices = len(self.mesh.devices)
        on_gpu = jax.default_backend() == "gpu"
        # A core's cache holds few clients; a GPU wants many networks at a time, more where clients differ in size and get
        # done one after the other, and all there are where steps are small.
        networks, each = 256 if shape.full else 512, shape.runs + len(shape.run_V)
        in_span = 256 if len(shape.sizes) == 1 else 32  # those of a chunk are of one size class
        gpu_chunk = in_span if model.head is not None else max(1, networks // each)
        self.chunk = gpu_chunk if on_gpu else 8
        self.by_client, self.replicated = NamedSharding(self.mesh, BY_CLIENT), NamedSharding(self.mesh, EVERYWHERE)
        self.like = jax.eval_shape(model.init, jax.random.key(0))
        start, self.unravel = ravel_pytree(jax.tree.map(jnp.zeros_like, self.like))
        self.parameters = start.size
        graphs = {"xla_gpu_graph_min_graph_size": 1} if on_gpu else None  # many small kernels, launched as one
        self.round = jax.jit(self._round, donate_argnums=(0, 1), compiler_options=graphs)
        self.scores = jax.jit(self._scores)
        self.client_scores = jax.jit(self._client_scores, static_argnums=0)
        self.lay = jax.jit(self._lay, donate_argnums=0)
        self.grams = jax.jit(self._grams)

    def slots(self, clients_each: int) -> int:
        """The capacity for this many clients on each device: whole chunks, and few slots that nobody needs."""
        each = max(clients_each, 1)
        while self.chunk_of(each) < min(each, 3 * self.chunk / 4):
            each += 1
        return each * self.devices

    def chunk_of(self, slots_each: int) -> int:
        """How many clients train at a time: as many as divide the slots, not many more than the chunk."""
        return max(size for size in range(1, self.chunk + self.chunk // 4 + 1) if slots_each % size == 0)

    def put(self, value: Any, sharding: NamedSharding) -> Any:
        """Arrays of the host onto the devices; with several processes each gives the same."""
        if jax.process_count() == 1:
            return jax.device_put(value, sharding)
        whole = lambda a: jax.make_array_from_callback(np.shape(a), sharding, lambda part: np.asarray(a)[part])  # noqa: E731
        return jax.tree.map(whole, value)

    def fetch(self, value: Array) -> np.ndarray:
        """An array of the devices on the host, of every host."""
        return np.asarray(value if value.is_fully_addressable else multihost_utils.process_allgather(value, tiled=True))

    def _round(
        self,
        state_R: ServerState,
        personal_K: Parameters | None,
        data: Data,
        slots: Array,
        numbers: RoundParamsBatch,
        rates: Array,
        keys: Array,
    ) -> tuple[ServerState, Parameters | None, Array]:
        """One round of Algorithm 1; ``keys``: that of the batches, then that of each run's noise."""
        batch_key, noise_key_R = jax.random.wrap_key_data(keys[0]), jax.random.wrap_key_data(keys[1:])
        taken = (BY_CLIENT, self._examples, BY_CLIENT, EVERYWHERE)
        spread = self._shard_map(self._on_device, taken, (EVERYWHERE, BY_CLIENT))
        theta_R = jax.vmap(self.unravel)(state_R.theta_P)
        sums_R, personal_K = spread(personal_K, data, slots, Asked(theta_R, state_R.clip, numbers, rates, batch_key))
        if self.parameters % self.devices == 0:  # each device draws its part of the one noise
            parts = NamedSharding(self.mesh, PartitionSpec(None, AXIS))
            sums_R = sums_R._replace(update_P=jax.lax.with_sharding_constraint(sums_R.update_P, parts))
        state_R = jax.vmap(partial(finish_round, self.server))(numbers.terms_R, state_R, sums_R, noise_key_R)
        return jax.lax.with_sharding_constraint(state_R, self.replicated), personal_K, jnp.sum(state_R.clip)

    def _on_device(
        self, personal_K: Parameters | None, data: Data, table: Array, asked: Asked
    ) -> tuple[Sums, Parameters | None]:
        """The device's share of the cohort, chunk by chunk: updates summed, personal models moved."""
        chunk = self.chunk_of(table.shape[0])

        def of_chunk(number: Array, carry: tuple[Sums, Parameters | None]) -> tuple[Sums, Parameters | None]:
            sums, personal_K = carry
            mine = SlotTable(*jax.lax.dynamic_slice_in_dim(table, number * chunk, chunk).T)
            own_C = self._personal(asked.theta_R, personal_K, mine)
            size = jnp.sum(jnp.max(mine.count_C) > np.array(self.shape.sizes[:-1], np.int32))
            at_sizes = [partial(self._train, data, asked, size) for size in self.shape.sizes]
            here, own_C = jax.lax.switch(size, at_sizes, mine, own_C)
            if personal_K is not None:
                keep = lambda kept_K, uninitialized_C: kept_K.at[mine.row_C].set(
                    uninitialized_C, mode="drop", unique_indices=True
                )
                personal_K = jax.tree.map(keep, personal_K, own_C)
            return jax.tree.map(jnp.add, sums, here), personal_K

        nobody_RG = jnp.zeros(asked.numbers.terms_R.weight_G.shape, jnp.int32)
        nothing = Sums(jax.tree.map(jnp.zeros_like, asked.theta_R), jnp.zeros_like(asked.clip_R), nobody_RG)
        is_participating_C = table[:, SlotTable._fields.index("is_participating_C")]
        chunks = -(-jnp.max(is_participating_C * jnp.arange(1, len(is_participating_C) + 1)) // chunk)
        sums, personal_K = jax.lax.fori_loop(0, chunks, of_chunk, (nothing, personal_K))
        flat_RP = jax.vmap(lambda update: ravel_pytree(update)[0])(sums.update_P)
        return jax.lax.psum(sums._replace(update_P=flat_RP), AXIS), personal_K

    def _personal(self, theta_R: Parameters, personal_K: Parameters | None, mine: SlotTable) -> Parameters | None:
        """The personal models of these clients: theta_j ← theta, if not initialised."""
        if personal_K is None:
            return None

        def of_leaf(own_K: Array, theta_R: Array) -> Array:
            uninitialized_C = mine.uninitialized_C.reshape(-1, *[1] * theta_R.ndim)
            return jnp.where(uninitialized_C == 1, theta_R[self.run_V], own_K[mine.row_C])

        return jax.tree.map(of_leaf, personal_K, theta_R)

    def _train(
        self, data: Data, asked: Asked, size: int, mine: SlotTable, own_CV: Parameters | None
    ) -> tuple[Sums, Parameters | None]:
        """One chunk at one size: its clients train, their updates are clipped and summed for every run."""
        key_C = jax.vmap(partial(jax.random.fold_in, asked.key))(mine.client_C)
        order_CM = orders(key_C, mine.count_C, size)
        x_CM, y_CM = examples_at(data.x_N, data.y_N, mine.start_C, mine.count_C, order_CM, self.shape.full)
        gram_CMM = None
        if data.gram_K is not None:
            # They are symmetric, so rows are put in order twice, which is faster than rows and columns.
            in_order = lambda start, order_M: data.gram_K[start // size, order_M].T[order_M]  # noqa: E731
            gram_CMM = jax.vmap(in_order)(mine.start_C, order_CM)
        terms_R, pull_VG = asked.numbers
        clients = Clients(x_CM, y_CM, mine.count_C, pull_VG[:, mine.group_C].T, key_C, gram_CMM)
        held_in = coordinates(self.model, size, self.shape.inputs)
        models = (asked.theta_R, own_CV, self.run_V)
        sent, own_CV = client_updates(
            self.model, self.training, held_in, clients, *models, asked.rates, self.shape.full
        )

        if (
            data.x_N.dtype != jnp.uint8
        ):  # a client whose inputs are not finite is refused by its norm, and adds no 0 · NaN
            x_CM = jnp.where(jnp.isfinite(x_CM), x_CM, 0.0)

        def of_run(terms: RoundParams, clip: Array, update_C: Parameters, norm_C: Array) -> Sums:
            updates = Updates(norm_C, lambda scale_C: held_in.add(scale_C, update_C, x_CM))
            return clip_and_sum(terms, clip, updates, mine.group_C, mine.is_participating_C == 1)

        return jax.vmap(of_run, in_axes=(0, 0, 1, 1))(terms_R, asked.clip_R, sent.update_CR, sent.norm_CR), own_CV

    @property
    def _examples(self) -> PartitionSpec:
        """How examples are split."""
        return EVERYWHERE if self.shape.replicated else BY_CLIENT

    def _grams(self, x_N: Array) -> Array:
        """The products of every client's examples with each other, where clients are alike and lie behind each other."""
        (size,) = self.shape.sizes

        def on_device(x_N: Array) -> Array:
            x_KM = x_N.reshape(-1, size, *x_N.shape[1:])
            return jax.lax.map(lambda x_M: gram(as_floats(x_M)), x_KM, batch_size=self.chunk)

        return self._shard_map(on_device, (self._examples,), self._examples)(x_N)

    def _scores(self, theta_RP: Array, x_N: Array, y_N: Array) -> Array:
        """The score of each global model on each example, spread over the devices."""

        def on_device(theta_RP: Array, x_N: Array, y_N: Array) -> Array:
            theta_R = jax.vmap(self.unravel)(theta_RP)

            def of_one(example: tuple[Array, Array]) -> Array:
                x, y = example
                score = lambda theta: self.model.score(self.model.apply(theta, as_floats(x)[None], None), y[None])[0]  # noqa: E731
                return jax.vmap(score)(theta_R)

            return jax.lax.map(of_one, (x_N, y_N), batch_size=256)

        return self._shard_map(on_device, (EVERYWHERE, BY_CLIENT, BY_CLIENT), BY_CLIENT)(theta_RP, x_N, y_N)

    def _client_scores(
        self, most: int, theta_RP: Array, personal_K: Parameters | None, x_N: Array, y_N: Array, table: Array
    ) -> Array:
        """The mean score on each client's own examples of every global model, then of its personal ones."""

        def on_device(theta_RP: Array, personal_K: Parameters | None, x_N: Array, y_N: Array, table: Array) -> Array:
            theta_R = jax.vmap(self.unravel)(theta_RP)

            def of_one(row: Array) -> Array:
                mine = SlotTable(*row[:, None])
                x_CM, y_CM = examples_at(x_N, y_N, mine.start_C, mine.count_C, jnp.arange(most)[None])
                real_M = jnp.arange(most) < mine.count_C[0]

                def score(model: Parameters) -> Array:
                    score_M = self.model.score(self.model.apply(model, x_CM[0], None), y_CM[0])
                    return jnp.sum(jnp.where(real_M, score_M, 0.0)) / jnp.maximum(mine.count_C[0], 1)

                own_CV = self._personal(theta_R, personal_K, mine)
                scores = [jax.vmap(score)(theta_R)]
                scores += [] if own_CV is None else [jax.vmap(score)(jax.tree.map(lambda own: own[0], own_CV))]
                return jnp.concatenate(scores)

            return jax.lax.map(of_one, table, batch_size=min(self.chunk, table.shape[0]))

        spread = self._shard_map(on_device, (EVERYWHERE,) + (BY_CLIENT,) * 4, BY_CLIENT)
        return spread(theta_RP, personal_K, x_N, y_N, table)

    def _lay(self, desk_C: Parameters, brought_B: Parameters, row_B: Array) -> Parameters:
        """Some rows of personal models put where they belong on each device; a row out of bounds is nobody's."""

        def on_device(desk_C: Parameters, brought_B: Parameters, row_B: Array) -> Parameters:
            def one(b: Array, desk_C: Parameters) -> Parameters:  # row by row: a scatter would copy the desk
                def of_leaf(desk_C: Array, new_B: Array) -> Array:
                    row = jnp.minimum(row_B[b], desk_C.shape[0] - 1)
                    there = jax.lax.dynamic_index_in_dim(desk_C, row)
                    new = jnp.where(row == row_B[b], jax.lax.dynamic_index_in_dim(new_B, b), there)
                    return jax.lax.dynamic_update_slice_in_dim(desk_C, new, row, 0)

                return jax.tree.map(of_leaf, desk_C, brought_B)

            return jax.lax.fori_loop(0, row_B.shape[0], one, desk_C)

        return self._shard_map(on_device, (BY_CLIENT,) * 3, BY_CLIENT)(desk_C, brought_B, row_B)

    def _shard_map(self, on_device: Callable, taken: tuple, given: Any) -> Callable:
        """A function of one device on all of them, with what it takes and gives split as said."""
        return jax.shard_map(on_device, mesh=self.mesh, in_specs=taken, out_specs=given, check_vma=False)


def examples_at(
    x_N: Array, y_N: Array, start_C: Array, count_C: Array, order_CM: Array, full: bool = False
) -> tuple[Array, Array]:
    """Each client's examples in this order, as floats; past the last there is nothing, and nothing of a neighbour's."""
    if full:
        rows_CM = start_C[:, None] + order_CM
        return as_floats(x_N[rows_CM]), y_N[rows_CM]
    real_CM = jnp.arange(order_CM.shape[1]) < count_C[:, None]
    rows_CM = jnp.where(real_CM, start_C[:, None] + order_CM, 0)
    blank = lambda a_CM: jnp.where(real_CM.reshape(*real_CM.shape, *[1] * (a_CM.ndim - 2)), a_CM, 0)  # noqa: E731
    return blank(as_floats(x_N[rows_CM])), blank(y_N[rows_CM])
