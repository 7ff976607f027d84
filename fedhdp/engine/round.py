"""One round on many devices: a cohort's clients, a chunk at a time on each device, through client.py and server.py.

The devices are a mesh with the single axis ``clients``: the cores of a CPU (see ``devices.py``), the GPUs of a host, or
those of several hosts under ``jax.distributed``. Few clients train at a time on each device, so that their arrays stay in
its core's cache. Client k belongs to device k mod D: its examples and personal models are there and it trains there; only
sums of updates cross devices. A cohort is padded to a capacity that rarely changes, so that a round compiles once. How
many chunks run, and with which capacity for examples, depends on the cohort.

Several runs that draw the same cohorts are one program: R global models and V personal ones, where personal model v is
pulled towards the global model ``run_V[v]``. What depends on the examples alone is then computed once for all.

With exact arithmetic the devices return every client's update, and ``integer_sums.py`` sums them on the host.

Axis letters: K clients of the population, C slots of the cohort, R global models, V personal models, G groups, N examples
on a device, M examples of one client (padded), B rows of personal models, P parameters.
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

from fedhdp.client import LocalTraining, scale_inputs, shuffle
from fedhdp.engine.checks import check_optimizers
from fedhdp.engine.chunk import Clients, client_updates
from fedhdp.engine.low_rank import gram, parametrize, uses_low_rank
from fedhdp.engine.network import Network
from fedhdp.mechanism import RoundParams
from fedhdp.metrics import Metric
from fedhdp.models import Array, Model, Parameters
from fedhdp.server import Layers, ServerOptimizer, ServerState, Sums, Updates, apply_update, clip_and_sum, finish_round

AXIS = "clients"
BY_CLIENT, REPLICATED = PartitionSpec(AXIS), PartitionSpec()


class EngineConfig(NamedTuple):
    """What is fixed when a round is compiled, besides the model, local training and the server's optimizer."""

    x: jax.ShapeDtypeStruct  # one input as the model gets it
    sizes: tuple[int, ...]  # capacities for examples; a client trains at the smallest that holds its own
    uniform_size: bool  # all clients have as many examples as the only capacity
    replicated: bool  # all examples are on all devices
    run_V: tuple[int, ...]  # the global model of each personal one
    runs: int = 1
    input_scale: float | None = None  # of the inputs, as `FederatedData` has it
    layers: Layers | None = None  # that are clipped one by one
    exact: bool = False  # updates are written out and summed in integers


class SlotTable(NamedTuple):
    """The cohort slot by slot, and where on its device a client's arrays are; sent as one table of integers."""

    client_C: Any
    group_C: Any
    start_C: Any  # the client's first example
    count_C: Any  # how many it has
    row_C: Any  # its personal models; out of bounds in an empty slot
    is_participating_C: Any  # 0: the slot is empty
    uninitialized_C: Any  # 1: it has no personal models yet


class ExampleArrays(NamedTuple):
    """The examples of the clients on a device, one client after the other."""

    x_N: Any
    y_N: Any
    gram_K: Any = None  # each client's Gram matrix, if they are stored


class RoundParamsBatch(NamedTuple):
    """The constants of every run's mechanism, and the pull of each personal model in each group."""

    params_R: RoundParams
    pull_VG: Any


class RoundInputs(NamedTuple):
    """What a round sends to every device."""

    theta_R: Parameters
    clip_R: Array
    constants: RoundParamsBatch
    rates: Array
    key: Array  # of shuffling and dropout


class Engine:
    """A compiled round for one model, one way of local training and one layout of the data."""

    def __init__(self, model: Model, training: LocalTraining, server: ServerOptimizer, config: EngineConfig):
        self.model, self.training, self.network = model, training, Network(model, config.x, training)
        self.server, self.config = server, config
        self.run_V = np.array(config.run_V, int)
        self.mesh = Mesh(np.array(jax.devices()), (AXIS,))
        self.devices = len(self.mesh.devices)
        local = [d for d, device in enumerate(self.mesh.devices) if device.process_index == jax.process_index()]
        self.local_devices = range(local[0], local[-1] + 1)  # those of this process, by their number in the mesh
        on_gpu = jax.default_backend() == "gpu"
        self.by_client, self.replicated = NamedSharding(self.mesh, BY_CLIENT), NamedSharding(self.mesh, REPLICATED)
        self._example_spec = REPLICATED if config.replicated else BY_CLIENT
        self.like = jax.eval_shape(model.init, jax.random.key(0))
        check_optimizers(self.like, training, server)
        zeros_P, self.unravel = ravel_pytree(jax.tree.map(jnp.zeros_like, self.like))
        self.parameters = zeros_P.size
        self.chunk = self._gpu_chunk() if on_gpu else self._cpu_chunk()
        graphs = {"xla_gpu_graph_min_graph_size": 1} if on_gpu else None  # launches many small kernels as one
        self.round = jax.jit(self._round, donate_argnums=(0, 1), compiler_options=graphs)
        self.train_cohort = jax.jit(self._train, donate_argnums=1, compiler_options=graphs)
        self.apply_updates = jax.jit(self._apply_updates, donate_argnums=0)
        self.server_values = jax.jit(self._server_values, static_argnums=0)
        self.client_values = jax.jit(self._client_values, static_argnums=(0, 1, 2))
        self.scatter_rows = jax.jit(self._scatter_rows, donate_argnums=0)
        self.gram_matrices = jax.jit(self._gram_matrices)

    def _gpu_chunk(self) -> int:
        """The chunk on a GPU: many networks, more where clients are dropped as they finish, most where steps are small."""
        if self.network.split(self.config.sizes[-1]).first_layer is not None:
            return 256 if len(self.config.sizes) == 1 else 32  # the clients of a chunk are of one capacity
        networks, models = 256 if self.config.uniform_size else 512, self.config.runs + len(self.run_V)
        return max(1, networks // models)

    def _cpu_chunk(self) -> int:
        """The chunk on a CPU: so few clients that a core's cache holds their models and updates."""
        if uses_low_rank(self.network, self.config.sizes[0], self.config.layers):
            return 8
        return max(1, min(8, 2**16 // self.parameters))

    def padded_cohort_size(self, clients_per_device: int) -> int:
        """The slots for this many clients on each device: whole chunks and few empty slots."""
        slots = max(clients_per_device, 1)
        while self.chunk_size(slots) < min(slots, 3 * self.chunk / 4):
            slots += 1
        return slots * self.devices

    def chunk_size(self, slots_per_device: int) -> int:
        """How many clients train at a time: a divisor of the slots that is not much more than the chunk."""
        limit = self.chunk + self.chunk // 4
        return max(size for size in range(1, limit + 1) if slots_per_device % size == 0)

    def put(self, value: Any, sharding: NamedSharding) -> Any:
        """Arrays of the host on the devices; each of several processes passes the same arrays."""
        if jax.process_count() == 1:
            return jax.device_put(value, sharding)

        def put_leaf(leaf: np.ndarray) -> Array:
            return jax.make_array_from_callback(np.shape(leaf), sharding, lambda part: np.asarray(leaf)[part])

        return jax.tree.map(put_leaf, value)

    def put_local(self, value: Any) -> Any:
        """Arrays over all devices, of which each process passes the part of its own devices."""
        if jax.process_count() == 1:
            return jax.device_put(value, self.by_client)
        return jax.tree.map(partial(jax.make_array_from_process_local_data, self.by_client), value)

    def fetch(self, value: Array) -> np.ndarray:
        """An array of the devices on the host, of every host."""
        if not value.is_fully_addressable:
            value.block_until_ready()  # two programs at once could wait for each other's threads
            value = multihost_utils.process_allgather(value, tiled=True)
        return np.asarray(value)

    def _round(
        self,
        state_R: ServerState,
        personal_K: Parameters | None,
        examples: ExampleArrays,
        slots: Array,
        constants: RoundParamsBatch,
        rates: Array,
        keys: Array,
    ) -> tuple[ServerState, Parameters | None, Array]:
        """One round of Algorithm 1; ``keys``: one for the batches, then one for each run's noise."""
        noise_key_R = jax.random.wrap_key_data(keys[1:])
        sums_R, personal_K = self._train(state_R, personal_K, examples, slots, constants, rates, keys[0])
        if self.parameters % self.devices == 0:  # each device draws its part of the one noise
            by_parameter = NamedSharding(self.mesh, PartitionSpec(None, AXIS))
            sums_R = sums_R._replace(update_P=jax.lax.with_sharding_constraint(sums_R.update_P, by_parameter))
        state_R = jax.vmap(partial(finish_round, self.server, layers=self.config.layers))(
            constants.params_R, state_R, sums_R, noise_key_R
        )
        return jax.lax.with_sharding_constraint(state_R, self.replicated), personal_K, jnp.sum(state_R.clip)

    def _train(
        self,
        state_R: ServerState,
        personal_K: Parameters | None,
        examples: ExampleArrays,
        slots: Array,
        constants: RoundParamsBatch,
        rates: Array,
        batch_key: Array,
    ) -> tuple[Any, Parameters | None]:
        """The training of a cohort: every run's sums, or with exact arithmetic update_CRP; and the personal models."""
        in_specs = (BY_CLIENT, self._example_spec, BY_CLIENT, REPLICATED)
        out_specs = (BY_CLIENT if self.config.exact else REPLICATED, BY_CLIENT)
        key, theta_R = jax.random.wrap_key_data(batch_key), jax.vmap(self.unravel)(state_R.theta_P)
        inputs = RoundInputs(theta_R, state_R.clip, constants, rates, key)
        return self._shard_map(self._train_cohort, in_specs, out_specs)(personal_K, examples, slots, inputs)

    def _apply_updates(
        self, state_R: ServerState, update_RP: Array, clip_R: Array, refused_RG: Array
    ) -> tuple[ServerState, Array]:
        """Move every run's global model by its noised update."""
        state_R = jax.vmap(partial(apply_update, self.server))(state_R, update_RP, clip_R, refused_RG)
        return jax.lax.with_sharding_constraint(state_R, self.replicated), jnp.sum(state_R.clip)

    def _train_cohort(
        self, personal_K: Parameters | None, examples: ExampleArrays, table: Array, inputs: RoundInputs
    ) -> tuple[Any, Parameters | None]:
        """The device's part of the cohort, chunk by chunk: what `_train` returns."""
        size = self.chunk_size(table.shape[0])

        def add_chunk(number: Array, carry: tuple[Any, Parameters | None]) -> tuple[Any, Parameters | None]:
            sums_R, personal_K = carry
            chunk = SlotTable(*jax.lax.dynamic_slice_in_dim(table, number * size, size).T)
            personal_CV = self._personal(inputs.theta_R, personal_K, chunk)
            size_class = jnp.sum(jnp.max(chunk.count_C) > np.array(self.config.sizes[:-1], np.int32))
            branches = [partial(self._train_chunk, examples, inputs, capacity) for capacity in self.config.sizes]
            chunk_sums_R, personal_CV = jax.lax.switch(size_class, branches, chunk, personal_CV)
            if personal_K is not None:

                def update_rows(leaf_K: Array, leaf_CV: Array) -> Array:
                    return leaf_K.at[chunk.row_C].set(leaf_CV, mode="drop", unique_indices=True)

                personal_K = jax.tree.map(update_rows, personal_K, personal_CV)
            if self.config.exact:  # these are update_CRP
                sums_R = jax.lax.dynamic_update_slice_in_dim(sums_R, chunk_sums_R, number * size, 0)
            else:
                sums_R = jax.tree.map(jnp.add, sums_R, chunk_sums_R)
            return sums_R, personal_K

        runs, groups = inputs.constants.params_R.weight_G.shape
        zeros_RP = jnp.zeros((runs, self.parameters))
        zero_sums_R: Any = Sums(zeros_RP, jnp.zeros_like(inputs.clip_R), jnp.zeros((runs, groups), jnp.int32))
        if self.config.exact:
            zero_sums_R = jnp.zeros((len(table), runs, self.parameters))
        is_participating_C = table[:, SlotTable._fields.index("is_participating_C")]
        last_slot = jnp.max(is_participating_C * jnp.arange(1, len(is_participating_C) + 1))
        sums_R, personal_K = jax.lax.fori_loop(0, -(-last_slot // size), add_chunk, (zero_sums_R, personal_K))
        return sums_R if self.config.exact else jax.lax.psum(sums_R, AXIS), personal_K

    def _personal(self, theta_R: Parameters, personal_K: Parameters | None, chunk: SlotTable) -> Parameters | None:
        """The personal models of these clients: theta_j ← theta, if not initialized."""
        if personal_K is None:
            return None

        def of_leaf(personal_K: Array, theta_R: Array) -> Array:
            uninitialized_C = chunk.uninitialized_C.reshape(-1, *[1] * theta_R.ndim)
            return jnp.where(uninitialized_C == 1, theta_R[self.run_V], personal_K[chunk.row_C])

        return jax.tree.map(of_leaf, personal_K, theta_R)

    def _train_chunk(
        self,
        examples: ExampleArrays,
        inputs: RoundInputs,
        capacity: int,
        chunk: SlotTable,
        personal_CV: Parameters | None,
    ) -> tuple[Any, Parameters | None]:
        """One chunk at one capacity: its clients train, and their updates are clipped and summed, or written out."""
        key_C = jax.vmap(partial(jax.random.fold_in, inputs.key))(chunk.client_C)
        order_CM = jax.vmap(partial(shuffle, capacity=capacity))(key_C, chunk.count_C)
        uniform_size = self.config.uniform_size
        slots = (chunk.start_C, chunk.count_C, order_CM)
        x_CM, y_CM = examples_at(examples.x_N, examples.y_N, *slots, self.config.input_scale, uniform_size)
        gram_CMM = None
        if examples.gram_K is not None:

            def shuffled_gram(start: Array, order_M: Array) -> Array:
                """Gram matrices are symmetric: rows are gathered twice, which is faster than rows and columns."""
                return examples.gram_K[start // capacity, order_M].T[order_M]

            gram_CMM = jax.vmap(shuffled_gram)(chunk.start_C, order_CM)
        params_R, pull_VG = inputs.constants
        finite = jnp.issubdtype(examples.x_N.dtype, jnp.integer)
        layers = self.config.layers
        parametrization = parametrize(self.network, inputs.theta_R, self.run_V, x_CM, gram_CMM, finite, layers)
        clients = Clients(y_CM, chunk.count_C, pull_VG[:, chunk.group_C].T, key_C)
        updates_R, personal_CV = client_updates(
            self.model, self.training, parametrization, clients, personal_CV, inputs.rates, uniform_size
        )
        if self.config.exact:
            update_CR = parametrization.to_params(updates_R.update_CR, None)
            return jax.vmap(jax.vmap(lambda update: ravel_pytree(update)[0]))(update_CR), personal_CV

        def sum_run(params: RoundParams, clip: Array, update_C: Parameters, norm_C: Array) -> Sums:
            def weighted_sum(scale_C: Array) -> Array:
                return ravel_pytree(parametrization.weighted_sum(scale_C, update_C))[0]

            updates = Updates(norm_C, weighted_sum)
            return clip_and_sum(params, clip, updates, chunk.group_C, chunk.is_participating_C == 1)

        sums_R = jax.vmap(sum_run, in_axes=(0, 0, 1, 1))(params_R, inputs.clip_R, *updates_R)
        return sums_R, personal_CV

    def _gram_matrices(self, x_N: Array) -> Array:
        """The Gram matrix of every client, where all have as many examples and these are stored without gaps."""
        (capacity,) = self.config.sizes

        def on_device(x_N: Array) -> Array:
            x_KM = x_N.reshape(-1, capacity, *x_N.shape[1:])
            split = self.network.split(capacity)

            def of_client(x_M: Array) -> Array:
                rows_MF, _ = split.first_rows(scale_inputs(x_M, self.config.input_scale))
                return gram(rows_MF, split.has_bias)

            return jax.lax.map(of_client, x_KM, batch_size=self.chunk)

        return self._shard_map(on_device, (self._example_spec,), self._example_spec)(x_N)

    def _server_values(
        self, metrics: tuple[Metric, ...], theta_P: Array, x_N: Array, y_N: Array, count: Array
    ) -> tuple[Array, Array]:
        """The metrics of a global model on the first examples, and its outputs, which are computed on all devices."""

        def on_device(theta_P: Array, x_N: Array) -> Array:
            theta, input_scale = self.unravel(theta_P), self.config.input_scale

            def apply(x_1: Array) -> Array:
                return self.network.apply(theta, scale_inputs(x_1, input_scale)[None], None)[0]

            return jax.lax.map(apply, x_N, batch_size=256)

        outputs_N = self._shard_map(on_device, (REPLICATED, BY_CLIENT), BY_CLIENT)(theta_P, x_N)
        outputs_N, y_N = jax.lax.with_sharding_constraint((outputs_N, y_N), self.replicated)
        return _values(metrics, outputs_N, y_N, jnp.arange(len(y_N)) < count), outputs_N

    def _client_values(
        self,
        capacity: int,
        metrics: tuple[Metric, ...],
        with_outputs: bool,
        theta_RP: Array,
        personal_K: Parameters | None,
        x_N: Array,
        y_N: Array,
        table: Array,
    ) -> tuple[Array, Array | None]:
        """The metrics, and the outputs, of every global model, then of a client's personal ones, on its examples."""

        def on_device(
            theta_RP: Array, personal_K: Parameters | None, x_N: Array, y_N: Array, table: Array
        ) -> tuple[Array, Array | None]:
            theta_R = jax.vmap(self.unravel)(theta_RP)

            def of_client(row: Array) -> tuple[Array, Array | None]:
                slot = SlotTable(*row[:, None])
                position_CM, input_scale = jnp.arange(capacity)[None], self.config.input_scale
                x_CM, y_CM = examples_at(x_N, y_N, slot.start_C, slot.count_C, position_CM, input_scale)
                real_M = jnp.arange(capacity) < slot.count_C[0]

                def of_model(theta: Parameters) -> tuple[Array, Array | None]:
                    outputs_M = self.network.apply(theta, x_CM[0], None)
                    return _values(metrics, outputs_M, y_CM[0], real_M), outputs_M if with_outputs else None

                values = [jax.vmap(of_model)(theta_R)]
                personal_CV = self._personal(theta_R, personal_K, slot)
                if personal_CV is not None:
                    values.append(jax.vmap(of_model)(jax.tree.map(lambda leaf_CV: leaf_CV[0], personal_CV)))
                return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *values)

            return jax.lax.map(of_client, table, batch_size=min(self.chunk, table.shape[0]))

        in_specs = (REPLICATED, BY_CLIENT, BY_CLIENT, BY_CLIENT, BY_CLIENT)
        return self._shard_map(on_device, in_specs, BY_CLIENT)(theta_RP, personal_K, x_N, y_N, table)

    def _scatter_rows(self, buffer_C: Parameters, rows_B: Parameters, index_B: Array) -> Parameters:
        """Rows of personal models written into a buffer on each device; a row with an index out of bounds is dropped."""

        def on_device(buffer_C: Parameters, rows_B: Parameters, index_B: Array) -> Parameters:
            def write_row(b: Array, buffer_C: Parameters) -> Parameters:  # row by row: a scatter would copy the buffer
                def of_leaf(buffer_C: Array, rows_B: Array) -> Array:
                    index = jnp.minimum(index_B[b], buffer_C.shape[0] - 1)
                    present = jax.lax.dynamic_index_in_dim(buffer_C, index)
                    row = jnp.where(index == index_B[b], jax.lax.dynamic_index_in_dim(rows_B, b), present)
                    return jax.lax.dynamic_update_slice_in_dim(buffer_C, row, index, 0)

                return jax.tree.map(of_leaf, buffer_C, rows_B)

            return jax.lax.fori_loop(0, index_B.shape[0], write_row, buffer_C)

        return self._shard_map(on_device, (BY_CLIENT,) * 3, BY_CLIENT)(buffer_C, rows_B, index_B)

    def _shard_map(self, on_device: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        """A function of one device mapped over the mesh."""
        return jax.shard_map(on_device, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _values(metrics: tuple[Metric, ...], outputs_M: Array, y_M: Array, real_M: Array) -> Array:
    """The metrics of some examples."""
    values = [jnp.asarray(metric.function(outputs_M, y_M, real_M), jnp.float32) for metric in metrics]
    return jnp.stack(values) if values else jnp.zeros(0)


def examples_at(
    x_N: Array,
    y_N: Array,
    start_C: Array,
    count_C: Array,
    order_CM: Array,
    input_scale: float | None,
    uniform_size: bool = False,
) -> tuple[Array, Array]:
    """Each client's examples in this order, inputs as the model gets them; padding is 0, not a neighbour's examples."""
    if uniform_size:
        index_CM = start_C[:, None] + order_CM
        return scale_inputs(x_N[index_CM], input_scale), y_N[index_CM]
    real_CM = jnp.arange(order_CM.shape[1]) < count_C[:, None]
    index_CM = jnp.where(real_CM, start_C[:, None] + order_CM, 0)

    def masked(values_CM: Array) -> Array:
        return jnp.where(real_CM.reshape(*real_CM.shape, *[1] * (values_CM.ndim - 2)), values_CM, 0)

    return masked(scale_inputs(x_N[index_CM], input_scale)), masked(y_N[index_CM])
