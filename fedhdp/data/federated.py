"""Federated data: the examples of every client, and the server's own test set.

Examples are flat arrays with a start and a count for each client, so that memory follows their number; images stay
``uint8``, and ``input_scale`` says what a byte means. Arrays may be memory-mapped: only a cohort's examples are read.

A client has an id and, where it is known, a privacy level. Both belong to the client, not to its position.

Axis letters: K clients, C clients of a cohort, N examples, M examples of one client, padded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedhdp.data.columns import Standardize
from fedhdp.data.levels import LevelSize, level_counts
from fedhdp.data.rows import VALIDATION, client_generator, order_by_client, partition_rows, share_or_arrays
from fedhdp.data.sources import Examples, ExampleSource, examples
from fedhdp.data.tables import huggingface_columns, table_arrays, torch_arrays
from fedhdp.data.targets import class_targets
from fedhdp.data.values import NUMBER, input_array, invalid_rows, invalid_value
from fedhdp.errors import DataError, require

MAX_SCALE = 1e9  # of inputs, so that no integer becomes infinite: the engine relies on that


class FederatedData(NamedTuple):
    """Every client's examples and the server's test set.

    Attributes:
        name: A name for tables.
        train: The clients' training examples.
        test: The clients' test examples; a client may have none.
        server_x_N: The inputs of the server's test set, which may be empty.
        server_y_N: Its targets.
        classes: The number of classes, or of outputs.
        validation: Examples that clients hold out to choose by, never trained on.
        client_ids: The clients' ids, strings that differ. None: their numbers.
        levels: Each client's privacy level, the name of its group. None: not known.
        input_scale: Inputs are multiplied by it, as floats. None: floats reach the model as they are, integers as integers.
        class_names: The names of the classes. None: not known.
        preparation: How columns became inputs, and whose statistics that took.
        public_levels: The levels of clients whose statistics that took: they must have opted out of privacy.
        server_has_client_data: Whether the server's test set consists of clients' examples, so that what it measures is as
            private as what clients measure. So it is unless the data says that it does not.
    """

    name: str
    train: ExampleSource
    test: Examples
    server_x_N: np.ndarray
    server_y_N: np.ndarray
    classes: int
    validation: Examples | None = None
    client_ids: np.ndarray | None = None
    levels: np.ndarray | None = None
    input_scale: float | None = None
    class_names: tuple[str, ...] | None = None
    preparation: str = ""
    public_levels: tuple[str, ...] = ()
    server_has_client_data: bool = True

    def __repr__(self) -> str:
        """Name and sizes, without the arrays."""
        levels = [] if self.levels is None else zip(*np.unique(self.levels, return_counts=True), strict=True)
        of_levels = ", ".join(f"{count:,} {level}" for level, count in levels)
        clients = f"{self.num_clients:,} clients" + (f" ({of_levels})" if of_levels else "")
        train, test = (int(np.sum(part.count_K)) for part in (self.train, self.test))
        examples = f"{train:,} training and {test:,} test examples, {len(self.server_y_N):,} of the server"
        return f"FederatedData({self.name!r}: {clients}, {examples}, {self.classes} classes)"

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return len(self.train.count_K)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return self.template.x_N.shape[1:]

    @property
    def template(self) -> Examples:
        """Examples in memory: their arrays tell the shape and type of inputs and targets."""
        return self.train if isinstance(self.train, Examples) else self.test

    @property
    def ids(self) -> np.ndarray:
        """Each client's id, a string."""
        if self.client_ids is not None:
            return np.asarray(self.client_ids).astype(str)
        return np.arange(self.num_clients).astype(f"<U{len(str(self.num_clients))}")

    @classmethod
    def from_arrays(
        cls,
        x: Any,
        y: Any,
        client: Any,
        level: Any = None,
        test: float | tuple[Any, Any, Any] | None = 0.2,
        server: float | tuple[Any, Any] | None = None,
        *,
        name: str = "arrays",
        classes: int | Sequence[str] | None = None,
        input_scale: float | None = None,
        seed: int = 0,
    ) -> FederatedData:
        """Data from arrays with one row for each example, in any order. Clients are sorted by id.

        Args:
            x: The inputs. Their type is kept.
            y: The targets. Text becomes classes, whose names are kept.
            client: Each example's client: strings or whole numbers.
            level: Each example's level, the same for all of a client's; or a mapping of clients to levels; None: not known.
            test: The share of its examples that a client tests on, drawn at random: at least one, never all. Or examples
                ``(x, y, client)``, or None.
            server: The server's test set: examples ``(x, y)``, or the share of each client's examples that it takes away.
                None for no server test set.
            name: A name for tables.
            classes: The number of classes, or their names in order. None takes them from the labels of all clients.
            input_scale: What inputs are multiplied by, such as 1/255 for bytes of images; None leaves them as they are.
            seed: Seed of the examples that are held out. Those of one client do not depend on other clients.

        Raises:
            DataError: If arrays do not fit each other, or a client has no level or several.
            InvalidValueError: If a share is out of range.
        """
        test_share, test_rows = share_or_arrays("test", test, ("x", "y", "client"))
        server_share, server_rows = share_or_arrays("server", server, ("x", "y"))
        rows = partition_rows(client, level, test_share, server_share, seed)
        others = [part for part in (test_rows, server_rows) if part]
        (y_N, *other_y), classes, class_names = class_targets([y, *(part[1] for part in others)], classes)
        count = len(rows.client_N)
        require(len(y_N) == count, "y", len(y_N), f"one for each of {count} examples", DataError)
        x_N, *other_x = (input_array(part[0], len(part[1])) for part in [(x, y_N), *others])
        train = examples(x_N[rows.train_N], y_N[rows.train_N], rows.train_count_K)
        test_part = examples(x_N[rows.test_N], y_N[rows.test_N], rows.test_count_K)
        server_part = (x_N[rows.server_N], y_N[rows.server_N])
        if test_rows:
            order_N, count_K = order_by_client(test_rows[2], rows.client_ids)
            test_part = examples(other_x[0][order_N], other_y[0][order_N], count_K)
        if server_rows:
            server_part = (other_x[-1], other_y[-1])
        ids, levels = rows.client_ids, rows.levels
        data = cls(name, train, test_part, *server_part, classes, None, ids, levels, input_scale, class_names)
        check_values(data)
        return data._replace(server_has_client_data=not server_rows and len(server_part[1]) > 0)

    @classmethod
    def from_dataframe(
        cls,
        frame: Any,
        client: str,
        label: str,
        level: str | Mapping[Any, str] | None = None,
        test: Any = 0.2,
        server: Any = None,
        *,
        features: Sequence[str] | None = None,
        categories: Mapping[str, Sequence[Any]] | None = None,
        fill: Mapping[str, Any] | None = None,
        standardize: Standardize = "none",
        public: Sequence[str] = (),
        seed: int = 0,
        **others: Any,
    ) -> FederatedData:
        """Data from a table with one row for each example: numbers become inputs, categories one input for each value.

        Args:
            frame: A data frame of pandas or polars, a table of pyarrow, or a mapping of columns.
            client: The column with each example's client.
            label: The column to predict: text or whole numbers are classes, other numbers targets of shape [N, 1].
            level: The column with each client's level, a mapping of clients to levels, or None.
            test: As in `from_arrays`; examples are a table too.
            server: As in `from_arrays`; examples are a table too.
            features: The columns that are inputs; None for all others. A single column of arrays is taken as it is.
            categories: The values of columns of text, by column.
            fill: What replaces a missing value, by column. Without it, a missing value is an error.
            standardize: ``"none"``; mean and deviation by column; ``"public"``, those of the clients whose level is in
                ``public``; ``"server"``, those of the server's table. The last two also tell the values of categories.
            public: The levels of clients who opted out of privacy.
            seed: As in `from_arrays`.
            **others: ``name``, ``classes`` and ``input_scale`` of `from_arrays`.

        Raises:
            DataError: If a column or a cell cannot be used; the message names column and row.
        """
        columns = (client, label, level, test, server, features, categories, fill, standardize, public, seed)
        *arrays, preparation = table_arrays(frame, *columns)
        data = cls.from_arrays(*arrays, seed=seed, **({"name": "table"} | others))
        return data._replace(preparation=preparation, public_levels=tuple(public) if standardize == "public" else ())

    @classmethod
    def from_huggingface(
        cls,
        dataset: Any,
        client: str,
        label: str,
        level: Any = None,
        test: Any = 0.2,
        server: Any = None,
        **others: Any,
    ) -> FederatedData:
        """Data from a ``datasets.Dataset``, with the arguments of `from_dataframe`; tests and servers are datasets too.

        A column of images, of arrays or of lists of one length is taken as it is where it is the only feature. The names
        of a ``ClassLabel`` are kept.
        """
        selected = None if others.get("features") is None else [client, label, level, *others["features"]]
        parts = [huggingface_columns(part, selected) for part in (dataset, test, server)]
        names = getattr(dataset.features.get(label), "names", None)
        options: dict[str, Any] = {"name": "dataset", "classes": names} | others
        return cls.from_dataframe(parts[0], client, label, level, parts[1], parts[2], **options)

    @classmethod
    def from_torch(
        cls, dataset: Any, client: Any, level: Any = None, test: Any = 0.2, server: Any = None, **others: Any
    ) -> FederatedData:
        """Data from a map-style PyTorch dataset of ``(x, y)``, with the arguments of `from_arrays`.

        ``client`` has each example's client, in the order of the dataset. Test examples are ``(dataset, client)``, the
        server's are a dataset.

        Raises:
            DataError: If it has no length, or its examples differ in shape.
        """
        if isinstance(test, tuple):
            test = (*torch_arrays(test[0]), test[1])
        if hasattr(server, "__getitem__"):
            server = torch_arrays(server)
        return cls.from_arrays(*torch_arrays(dataset), client, level, test, server, **({"name": "torch"} | others))

    def with_levels(self, levels: Sequence[str] | np.ndarray | Mapping[str, Sequence[str]]) -> FederatedData:
        """The data with these levels.

        Args:
            levels: Each client's level, in the order of the clients; or by level the ids of its clients.

        Raises:
            DataError: If there is not one level for each client, or no client with an id.
        """
        if isinstance(levels, Mapping):
            return self.draw_levels({level: list(ids) for level, ids in levels.items()}, seed=0)
        if len(levels) != self.num_clients:
            message = f"there are {len(levels)} levels, but the data has {self.num_clients} clients"
            raise DataError(message, "levels", len(levels))
        return self._replace(levels=np.asarray(levels).astype(str))

    def draw_levels(self, sizes: Mapping[str, LevelSize], seed: int) -> FederatedData:
        """The data with levels that are drawn at random where no ids are given.

        Args:
            sizes: By level, its number of clients; as a float, its share of all clients; or the ids of its clients.
            seed: Seed of the draw.

        Raises:
            DataError: If the sizes are not those of all clients, no client has an id, or a client has two levels.
        """
        names, index_K = list(sizes), np.full(self.num_clients, -1)
        listed = {names.index(level): ids for level, ids in sizes.items() if not isinstance(ids, NUMBER)}
        number_of = {client: number for number, client in enumerate(self.ids.tolist())} if listed else {}
        for index, ids in listed.items():
            if isinstance(ids, str):
                message = f"level {names[index]!r} must have a count, a share or ids, got the text {ids!r}"
                raise DataError(message, "levels", ids)
            for client in map(str, ids):
                if client not in number_of:
                    message = f"level {names[index]!r} has a client {client!r}, which the data does not have"
                    raise DataError(message, "levels", client)
                if (other := index_K[number_of[client]]) >= 0:
                    message = f"client {client!r} has two levels, {names[other]!r} and {names[index]!r}"
                    raise DataError(message, "levels", client)
                index_K[number_of[client]] = index
        counts = level_counts(sizes, self.num_clients)
        drawn = [index for index in range(len(names)) if index not in listed]
        rng = np.random.default_rng([seed, 0, 2])  # stream 0 is the data's; its stream 1 draws the validation examples
        index_K[rng.permutation(np.flatnonzero(index_K < 0))] = np.repeat(drawn, [counts[names[i]] for i in drawn])
        return self._replace(levels=np.array(names)[index_K])

    def level_indices(self, names: Sequence[str]) -> np.ndarray:
        """The index of each client's level among these names of groups.

        Raises:
            DataError: If a level is not among them, or one of them is no client's level.
        """
        if self.levels is None or len(self.levels) != self.num_clients:
            count = 0 if self.levels is None else len(self.levels)
            message = f"there are {count} levels, but the data has {self.num_clients} clients"
            raise DataError(message, "levels", count)
        levels, index_K = np.asarray(self.levels).astype(str), np.full(self.num_clients, -1, np.int32)
        for index, name in enumerate(names):
            index_K[levels == name] = index
        if (index_K < 0).any():
            client = int(np.argmin(index_K))
            message = f"client {str(self.ids[client])!r} has the level {str(levels[client])!r}, which is no group's"
            raise DataError(f"{message}: groups are {', '.join(names)}", "levels", str(levels[client]))
        for name, count in zip(names, np.bincount(index_K, minlength=len(names)), strict=True):
            if count == 0:
                message = f"group {name!r} has no client: levels of the data are {', '.join(np.unique(levels))}"
                raise DataError(message, "groups", name)
        return index_K


def check_values(data: FederatedData) -> None:
    """Refuse values that no model can take: NaN, infinity, and numbers beyond 32 bits. Streamed examples are not read.

    Raises:
        DataError: If there is one among inputs or targets; it names the client by its id. Or if the inputs' scale is out of
            range.
    """
    scale = data.input_scale
    if scale is not None and not 0 < abs(scale) <= MAX_SCALE:
        message = f"input_scale must be finite, not 0 and at most {MAX_SCALE:g}, got {scale}"
        raise DataError(message, "input_scale", scale)
    server = Examples(data.server_x_N, data.server_y_N, np.zeros(1, int), np.array([len(data.server_y_N)]))
    parts = {"training": data.train, "test": data.test, "validation": data.validation, "server's test": server}
    for name, part in [(name, part) for name, part in parts.items() if isinstance(part, Examples)]:
        for field, values_N in (("inputs", part.x_N), ("targets", part.y_N)):
            for row in invalid_rows(values_N, scaled=field == "inputs" and data.input_scale is not None):
                owners = np.flatnonzero((part.start_K <= row) & (row < part.start_K + part.count_K))
                if len(owners):  # arrays may have rows that no client has
                    owner = "the server" if part is server else f"client {str(data.ids[owners[0]])!r}"
                    example = f"{name} example {row - part.start_K[owners[0]]}"
                    value = invalid_value(values_N[row])
                    message = f"{field} of {owner} must be finite and of at most 32 bits, got {value} in {example}"
                    raise DataError(message, field, value)


def hold_out(data: FederatedData, share: float, seed: int) -> FederatedData:
    """Move a share of each client's training examples to its validation examples, at least one if it has two.

    Args:
        data: The data.
        share: The share to hold out.
        seed: Seed of the choice, which for one client does not depend on the others' examples.

    Raises:
        InvalidValueError: If the share is not at least 0 and below 1.
        DataError: If the examples are generated when they are needed.
    """
    require(0 <= share < 1, "validation", share, "at least 0 and below 1")
    if share == 0:
        return data
    train = data.train
    if not isinstance(train, Examples):
        raise DataError(f"{data.name} is generated on demand: nothing can be held out of it", "validation", share)
    at_least_one_K = np.clip(np.round(share * train.count_K), 1, train.count_K - 1)
    held_out_K = np.where(train.count_K > 1, at_least_one_K, 0).astype(int)
    keys = range(data.num_clients) if data.client_ids is None else data.ids.tolist()
    train_rows, validation_rows = [], []
    for key, start, count, held_out in zip(keys, train.start_K, train.count_K, held_out_K, strict=True):
        order = start + client_generator(seed, VALIDATION, key).permutation(count)
        train_rows.append(np.sort(order[held_out:]))
        validation_rows.append(np.sort(order[:held_out]))
    parts = ((train_rows, train.count_K - held_out_K), (validation_rows, held_out_K))
    row_parts = ((np.concatenate(rows), count_K) for rows, count_K in parts)
    kept, validation = (examples(train.x_N[row_N], train.y_N[row_N], count_K) for row_N, count_K in row_parts)
    return data._replace(train=kept, validation=validation)
