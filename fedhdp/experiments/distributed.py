"""A run in several processes, on one machine or many, by ``jax.distributed``.

Process 0 leads: it alone has the run's directory, the ledger, loggers and progress, and it alone decides. Before a call of
its simulation that computes on all devices it sends the call to the other processes, which make it with their own
simulation of the same experiment. A process reads the examples, and holds the personal models, of its own clients alone;
only sums, metrics and rows that are asked for cross processes. Cohorts and noise keys are drawn by one process and sent to
the others (``rng.os_entropy``).
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from fedhdp import __version__
from fedhdp.data import FederatedData
from fedhdp.devices import use_cpu_cores
from fedhdp.errors import RunError
from fedhdp.experiments.bases import build_model
from fedhdp.experiments.config import Experiment
from fedhdp.experiments.toml import from_toml, to_toml
from fedhdp.mechanism import Mechanism, ScheduledMechanism
from fedhdp.models import Model, Parameters, name_parameters, unname_parameters
from fedhdp.results.store import BASIS_FILE
from fedhdp.simulation import Simulation, StateArrays

HEARTBEAT_SECONDS = 60  # after which a process that does not answer counts as dead
START_SECONDS = 300  # for all processes to connect
SOON_SECONDS = 10
PIECE_BYTES = 2**26  # of an array that is sent at a time
KEPT_MESSAGES = 100  # far more than process 0 is ahead: it waits for the last round before it starts another
END, INITIAL = "end", "initial/"


def join(processes: int, number: int, coordinator: str | None = None) -> None:
    """Connect this process with the others, before JAX uses a device.

    Args:
        processes: How many there are.
        number: This one's, from 0.
        coordinator: The address of process 0, as ``host:port``. None: all three as JAX finds them, under Slurm.
    """
    import jax

    named = coordinator is not None
    jax.distributed.initialize(
        coordinator,
        processes if named else None,
        number if named else None,
        initialization_timeout=START_SECONDS,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )
    use_cpu_cores()  # all exchange what devices they have
    _connect_devices()


def _connect_devices() -> None:
    """Connect all devices now: at the first round, processes that compile for longer than others would be given up."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("clients",))
    by_client, replicated = NamedSharding(mesh, PartitionSpec("clients")), NamedSharding(mesh, PartitionSpec())
    ones = jax.make_array_from_callback((jax.device_count(),), by_client, lambda part: np.ones(1, np.float32))
    jax.jit(jnp.sum, out_shardings=replicated)(ones).block_until_ready()


@contextmanager
def leading() -> Iterator[None]:
    """Lead the other processes, which end with this block, or with its error."""
    _CHANNEL.is_open = True
    try:
        yield
    finally:
        _CHANNEL.send(END)
        _CHANNEL.is_open = False


class Message(NamedTuple):
    """A call, its arguments, and arrays by name."""

    call: str
    arguments: tuple[Any, ...]
    arrays: dict[str, np.ndarray]


class Channel:
    """Messages of process 0 to all others, in order: small parts by JAX's coordination service, arrays by a broadcast.

    A message may be long in coming, for which a collective operation would not wait.
    """

    def __init__(self) -> None:
        self.count, self.is_open = 0, False  # open: this process leads

    def send(self, call: str, arguments: tuple[Any, ...] = (), arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Send a message to the other processes."""
        # not np.ascontiguousarray, of which the shape () is (1,)
        arrays = {name: np.asarray(array, order="C") for name, array in (arrays or {}).items()}
        shapes = [(name, array.dtype.str, array.shape) for name, array in arrays.items()]
        content = msgspec.msgpack.encode((call, arguments, shapes), enc_hook=lambda array: array.tolist())
        _client().key_value_set_bytes(self._key(), content)
        if self.count > KEPT_MESSAGES:
            _client().key_value_delete(f"fedhdp/{self.count - KEPT_MESSAGES}")
        for array in arrays.values():
            _broadcast(array)

    def receive(self, wait: bool = True) -> Message | None:
        """The next message, however long it takes; without ``wait`` None, if there is none soon."""
        key = self._key()
        while True:
            try:
                content = _client().blocking_key_value_get_bytes(key, 1000 * SOON_SECONDS)
                break
            except Exception as error:  # JAX has no class for it
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                if not wait:
                    return None
        call, arguments, shapes = msgspec.msgpack.decode(content)
        arrays = {name: _broadcast(np.zeros(shape, dtype)) for name, dtype, shape in shapes}
        return Message(call, arguments, arrays)

    def _key(self) -> str:
        self.count += 1
        return f"fedhdp/{self.count}"


_CHANNEL = Channel()


def _client() -> Any:
    from jax._src import distributed  # not public, but the only one that waits as long as it takes

    return distributed.global_state.client


def _broadcast(array: np.ndarray) -> np.ndarray:
    """Process 0's array, in all processes."""
    from jax.experimental import multihost_utils

    flat = array.reshape(-1).view(np.uint8) if array.size else np.zeros(0, np.uint8)
    parts = [flat[first : first + PIECE_BYTES] for first in range(0, len(flat), PIECE_BYTES)]
    received = [np.asarray(multihost_utils.broadcast_one_to_all(part)) for part in parts]
    return np.concatenate(received).view(array.dtype).reshape(array.shape) if received else array


CALLS = ("run_round", "client_scores", "evaluate", "named_parameters", "personal_models")  # made in every process


def _led(call: str) -> Callable[..., Any]:
    """A method of the simulation that is sent to the other processes."""
    function = getattr(Simulation, call)

    @wraps(function)
    def method(self: LeadingSimulation, *arguments: Any) -> Any:
        with self._sent(call, arguments):
            return function(self, *arguments)

    return method


class LeadingSimulation(Simulation):
    """The simulation of process 0: the others make its calls too."""

    _depth = 1  # of calls that have been sent; those within them are not
    set_mechanisms = _led("set_mechanisms")
    run_round, client_scores, evaluate, named_parameters, personal_models = map(_led, CALLS)

    def state_arrays(self) -> StateArrays:
        with self._sent("state_arrays"):
            arrays = super().state_arrays()
        return {name: self._part(name, value) if callable(value) else value for name, value in arrays.items()}

    def _part(self, name: str, compute: Callable[[], np.ndarray]) -> Callable[[], np.ndarray]:
        def part() -> np.ndarray:
            with self._sent("state_part", (name,)):
                return compute()

        return part

    def restore(self, arrays: dict[str, Any]) -> None:
        arrays = {name: array() if callable(array) else array for name, array in arrays.items()}
        numbers = {name: array for name, array in arrays.items() if np.asarray(array).dtype.kind in "biuf"}
        with self._sent("restore", (), numbers):
            super().restore(arrays)

    @contextmanager
    def _sent(
        self, call: str, arguments: tuple[Any, ...] = (), arrays: Mapping[str, np.ndarray] | None = None
    ) -> Iterator[None]:
        if self._depth == 0:
            _CHANNEL.send(call, arguments, arrays)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


def make_simulation(
    experiment: Experiment,
    numbers: Sequence[int],
    data: FederatedData,
    model: Model,
    mechanisms: Sequence[ScheduledMechanism],
    directory: Path,
    cohort_entropy: np.ndarray | None,
    initial_model: Parameters | None,
) -> Simulation:
    """The simulation of some variants of an experiment: this process's, or one that leads the others."""
    settings = (*experiment.overrides(numbers[0]), experiment.seed, experiment.noise_seed)
    arguments = (data, model, mechanisms, *settings, directory, cohort_entropy, initial_model)
    if not _CHANNEL.is_open:
        return Simulation(*arguments)
    named = {} if initial_model is None else name_parameters(initial_model)
    arrays = {f"{INITIAL}{name}": np.asarray(leaf) for name, leaf in named.items()}
    basis = directory.parent / BASIS_FILE
    if basis.exists():
        arrays[BASIS_FILE] = np.load(basis, allow_pickle=False)
    if cohort_entropy is not None:
        arrays["cohort_entropy"] = np.asarray(cohort_entropy)
    _CHANNEL.send("simulate", (to_toml(experiment), list(numbers), *_fingerprints(data)), arrays)
    simulation = LeadingSimulation(*arguments)
    simulation._depth = 0
    _check_personal(simulation)
    return simulation


def _fingerprints(data: FederatedData) -> tuple[str, str]:
    """The versions of the libraries, and a sha256 of the clients' ids and numbers of examples and the server's labels."""
    parts = (data.train.count_K, data.test.count_K, data.ids, data.server_y_N, np.array(data.input_shape))
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part.dtype.str} {part.shape} ".encode() + np.ascontiguousarray(part).tobytes())
    return f"fedhdp {__version__}, jax {version('jax')}, numpy {version('numpy')}", digest.hexdigest()


def _check_fingerprints(data: FederatedData, versions: str, digest: str) -> None:
    """Refuse to take part in a run that process 0 computes with other versions or data.

    Raises:
        RunError: If process 0 has other versions, or other clients.
    """
    own_versions, own_digest = _fingerprints(data)
    if own_versions != versions:
        raise RunError(
            f"processes must have the same versions: {own_versions} here, {versions} in process 0", "processes"
        )
    if own_digest != digest:
        raise RunError(
            "processes must load the same data: clients or their numbers of examples differ from process 0's", "data"
        )


def _check_personal(simulation: Simulation) -> None:
    """Refuse personal models that fit on no device: a file of them belongs to one process."""
    if simulation.has_personal_file:
        raise RunError("processes: personal models do not fit on the devices, and several processes share no file")


def follow() -> None:
    """Make the calls of process 0, until it ends.

    An error that process 0 has too is its to report; one of this process alone is raised.
    """
    follower, failure = Follower(), None
    while True:
        message = _CHANNEL.receive(wait=failure is None)  # process 0 may wait for this one's part of a call that failed
        if message is not None and message.call == END:
            return
        if message is None or failure is not None:
            assert failure is not None
            raise failure
        try:
            follower.make(message)
        except Exception as error:  # raised unless process 0 ends, by the same error
            failure = error


class Follower:
    """The simulation of a process that is not the first."""

    def __init__(self) -> None:
        self.simulation: Simulation | None = None
        self.parts: StateArrays = {}
        self.loaded: tuple[str, FederatedData] | None = None

    def make(self, message: Message) -> None:
        """Make one call."""
        call, arguments, arrays = message
        if call == "simulate":
            toml, numbers, versions, digest = arguments
            self._simulate(toml, numbers, (versions, digest), arrays)
            return
        assert self.simulation is not None
        if call == "set_mechanisms":
            self.simulation.set_mechanisms(msgspec.convert(arguments[0], tuple[Mechanism, ...]))
        elif call == "state_arrays":
            self.parts = self.simulation.state_arrays()
        elif call == "state_part":
            part = self.parts[arguments[0]]
            assert callable(part)
            part()
        elif call == "restore":
            self.simulation.restore(arrays)
        else:
            assert call in CALLS
            getattr(self.simulation, call)(*arguments)

    def _simulate(
        self, toml: str, numbers: list[int], fingerprints: tuple[str, str], arrays: Mapping[str, np.ndarray]
    ) -> None:
        """The simulation that process 0 makes, of the same experiment; loaded data serves the next one too."""
        experiment = from_toml(toml, "the experiment of process 0")
        key = json.dumps([repr(experiment.data), experiment.seed])
        if self.loaded is None or self.loaded[0] != key:
            self.loaded = key, experiment.load_data()
        data = self.loaded[1]
        mechanisms = experiment.variant_mechanisms(experiment.build_mechanism(data), data)
        with tempfile.TemporaryDirectory() as folder:
            if BASIS_FILE in arrays:
                np.save(Path(folder) / BASIS_FILE, arrays[BASIS_FILE])
            model, data = build_model(experiment, data, Path(folder))
        _check_fingerprints(data, *fingerprints)
        initial = {name.removeprefix(INITIAL): array for name, array in arrays.items() if name.startswith(INITIAL)}
        self.simulation = Simulation(
            data,
            model,
            [mechanisms[number] for number in numbers],
            *experiment.overrides(numbers[0]),
            experiment.seed,
            experiment.noise_seed,
            None,
            arrays.get("cohort_entropy"),
            unname_parameters(model, initial, "start_from") if initial else None,
        )
        _check_personal(self.simulation)
