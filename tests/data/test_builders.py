"""Federated data from arrays, Hugging Face and PyTorch: who has which rows, what is held out, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import raises_field
from hypothesis import given
from hypothesis import strategies as st

from fedhdp.data import Examples, FederatedData
from fedhdp.errors import DataError, FedHDPError

RNG = np.random.default_rng(0)
X, Y, CLIENT = np.arange(60).reshape(30, 2), RNG.integers(0, 3, 30), RNG.integers(0, 5, 30)
LEVELS = {0: "open", 1: "open", 2: "strict", 3: "strict", 4: "strict"}


def rows_of(part: Examples, client: int) -> list[int]:
    """The first input of each of a client's examples: in these tests, twice its row."""
    return part.x_N[part.start_K[client] :][: part.count_K[client], 0].tolist()


def test_rows_go_to_their_clients():
    data = FederatedData.from_arrays(X, Y, CLIENT, LEVELS, server=0.2)
    assert data.ids.tolist() == ["0", "1", "2", "3", "4"]
    assert data.levels.tolist() == ["open", "open", "strict", "strict", "strict"]
    for k in range(5):
        rows = rows_of(data.train, k) + rows_of(data.test, k)
        rows += [x for x in data.server_x_N[:, 0].tolist() if CLIENT[x // 2] == k]
        assert sorted(rows) == X[k == CLIENT, 0].tolist()
        assert data.train.count_K[k] >= 1
        assert bool(data.test.count_K[k]) == (np.count_nonzero(k == CLIENT) > 1)
    assert 0 < len(data.server_x_N) < 12
    assert data.train.x_N.dtype == X.dtype
    for part in (data.train, data.test):
        np.testing.assert_array_equal(part.y_N, Y[part.x_N[:, 0] // 2])
    assert len(FederatedData.from_arrays(X, Y, CLIENT).server_x_N) == 0


def test_level_belongs_to_the_client_not_to_its_position():
    """Rows in any order give the same levels and examples, by id."""
    order = RNG.permutation(30)
    level = np.array([LEVELS[client] for client in CLIENT])
    data = FederatedData.from_arrays(X[order], Y[order], CLIENT[order], level[order], test=None)
    assert data.levels.tolist() == list(LEVELS.values())
    names = np.array(["zoe", "ann", "bob", "cy", "dan"])[CLIENT]
    named = FederatedData.from_arrays(X, Y, names, level, test=None)
    assert dict(zip(named.ids, named.levels, strict=True)) == {
        "zoe": "open",
        "ann": "open",
        "bob": "strict",
        "cy": "strict",
        "dan": "strict",
    }
    assert rows_of(named.train, 4) == X[CLIENT == 0, 0].tolist()


@given(st.lists(st.integers(0, 9), min_size=2, max_size=40), st.integers(0, 9), st.integers(0, 3))
def test_held_out_rows_do_not_depend_on_other_clients(client, left_out, seed):
    """With a client more or less, the others train on the same examples."""
    client = np.array(client)
    if (client == left_out).all():
        return
    x, y = np.arange(2 * len(client)).reshape(-1, 2), np.zeros(len(client), int)

    def held_out(rows: np.ndarray) -> dict[str, list[list[int]]]:
        data = FederatedData.from_arrays(x[rows], y[rows], client[rows], test=0.3, server=0.2, seed=seed)
        return {id: [rows_of(part, k) for part in (data.train, data.test)] for k, id in enumerate(data.ids)}

    everybody, others = held_out(client >= 0), held_out(client != left_out)
    assert others == {id: parts for id, parts in everybody.items() if id != str(left_out)}


def test_labels_of_text_become_classes():
    names = np.array(["cat", "ant", "bee"])[Y]
    data = FederatedData.from_arrays(X, names, CLIENT, test=None)
    assert (data.class_names, data.classes) == (("ant", "bee", "cat"), 3)
    assert data.train.y_N.tolist() == np.array([2, 0, 1])[Y][np.argsort(CLIENT, kind="stable")].tolist()
    given_names = FederatedData.from_arrays(X, names, CLIENT, classes=["cat", "ant", "bee", "dog"])
    assert (given_names.class_names[2], given_names.classes) == ("bee", 4)
    assert FederatedData.from_arrays(X, Y, CLIENT, classes=7).classes == 7
    assert FederatedData.from_arrays(X, X / 7, CLIENT).classes == 2  # outputs


def test_objects_that_are_numbers_are_numbers():
    """As in the values of a data frame that also has text."""
    data = FederatedData.from_arrays(X.astype(object), Y.astype(object), CLIENT.astype(object), test=None)
    assert (data.train.x_N.dtype.kind, data.classes, data.class_names) == ("i", 3, None)
    assert data.ids.tolist() == ["0", "1", "2", "3", "4"]


def test_explicit_test_and_server_examples():
    test = (X[:6], Y[:6], np.array([3, 1, 1, 3, 0, 1]))
    data = FederatedData.from_arrays(X, Y, CLIENT, test=test, server=(X[6:9], Y[6:9]))
    assert data.test.count_K.tolist() == [1, 3, 0, 2, 0]
    assert rows_of(data.test, 1) == [2, 4, 10]
    assert data.train.count_K.sum() == 30
    assert data.server_x_N[:, 0].tolist() == [12, 14, 16]


def changed(values: np.ndarray, row: int, value: object) -> np.ndarray:
    values = values.astype(object)
    values[row] = value
    return values


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"x": X[:5]}, "x"),
        ({"x": [[1], [2, 3]]}, "x"),
        ({"x": X.astype(str)}, "x"),
        ({"y": Y[:5]}, "y"),
        ({"y": changed(Y, 3, None)}, "y"),
        ({"y": changed(Y, 3, np.nan).astype(float)}, "y"),
        ({"y": Y - 1}, "y"),
        ({"classes": 2}, "y"),
        ({"classes": 0}, "classes"),
        ({"classes": ["a", "a", "b"]}, "classes"),
        ({"x": np.ma.masked_less(X, 5)}, "x"),
        ({"classes": ["a", "b"]}, "y"),
        ({"y": Y.astype(str), "classes": ["0", "1"]}, "y"),
        ({"client": CLIENT[:5]}, "y"),
        ({"client": []}, "client"),
        ({"client": changed(CLIENT, 3, None)}, "client"),
        ({"client": CLIENT / 2}, "client"),
        ({"client": X}, "client"),
        ({"client": changed(CLIENT, 3, str(CLIENT[3]))}, "client"),
        ({"client": changed(CLIENT.astype(str), 3, float(CLIENT[3]))}, "client"),
        ({"level": {**LEVELS, "0": "open"}}, "level"),
        ({"level": {**LEVELS, 9: "open"}}, "level"),
        ({"level": {0: "open"}}, "level"),
        ({"level": ["open"] * 29}, "level"),
        ({"level": ["open"] * 29 + ["strict"]}, "level"),
        ({"level": ["open"] * 29 + [None]}, "level"),
        ({"level": [""] * 30}, "level"),
        ({"test": 1.0}, "test"),
        ({"test": float("nan")}, "test"),
        ({"test": "0.2"}, "test"),
        ({"test": (X, Y)}, "test"),
        ({"test": (X, Y, CLIENT[:4])}, "test"),
        ({"test": (X, Y, CLIENT + 100)}, "test"),
        ({"test": (X, Y / 2, CLIENT)}, "y"),
        ({"test": 0.5, "server": 0.5}, "server"),
        ({"server": -0.1}, "server"),
        ({"server": (X, Y[:3])}, "server"),
    ],
)
def test_wrong_arrays_are_refused(change, field):
    with raises_field(field, FedHDPError):
        FederatedData.from_arrays(**({"x": X, "y": Y, "client": CLIENT} | change))


def test_two_levels_of_a_client_are_refused_by_its_name():
    with pytest.raises(DataError, match="client 'b' has two levels, 'mild' and 'strict'"):
        FederatedData.from_arrays(X[:3], Y[:3], ["a", "b", "b"], ["open", "mild", "strict"])


def test_torch_dataset():
    torch = pytest.importorskip("torch")
    dataset = torch.utils.data.TensorDataset(torch.as_tensor(X, dtype=torch.float32), torch.as_tensor(Y))
    data = FederatedData.from_torch(dataset, CLIENT, LEVELS, test=None, server=dataset)
    assert data.train.x_N.dtype == np.float32
    assert rows_of(data.train, 2) == X[CLIENT == 2, 0].tolist()
    assert (len(data.server_x_N), data.test.count_K.sum(), data.levels[0]) == (30, 0, "open")
    assert FederatedData.from_torch(dataset, CLIENT, test=(dataset, CLIENT)).test.count_K.sum() == 30
    with raises_field("dataset", DataError):
        FederatedData.from_torch(iter(dataset), CLIENT)
    with raises_field("dataset", DataError):
        FederatedData.from_torch([(np.zeros(2), 0), (np.zeros(3), 0)], ["a", "b"])


def test_huggingface_dataset():
    datasets = pytest.importorskip("datasets")
    images = RNG.integers(0, 256, (30, 4, 4)).astype(np.uint8)
    columns = {"image": list(images), "label": Y.tolist(), "writer": [f"w{k}" for k in CLIENT], "seen": [True] * 30}
    kinds = {"label": datasets.ClassLabel(names=["a", "b", "c"]), "writer": datasets.Value("string")}
    features = datasets.Features(image=datasets.Image(), seen=datasets.Value("bool"), **kinds)
    dataset = datasets.Dataset.from_dict(columns, features=features)
    data = FederatedData.from_huggingface(
        dataset, "writer", "label", test=None, server=dataset, features=["image"], input_scale=1 / 255
    )
    np.testing.assert_array_equal(data.train.x_N, images[np.argsort(CLIENT, kind="stable")])
    assert (data.class_names, data.ids[0], data.input_scale) == (("a", "b", "c"), "w0", 1 / 255)
    assert len(data.server_x_N) == 30
    tokens = datasets.Dataset.from_dict({"tokens": [[1, 2]] * 30, "label": Y.tolist(), "writer": CLIENT.tolist()})
    assert FederatedData.from_huggingface(tokens, "writer", "label").train.x_N.dtype.kind == "i"
    for wrong in (datasets.DatasetDict(train=dataset), dataset.to_iterable_dataset(), dataset[:3]):
        with raises_field("dataset", DataError):
            FederatedData.from_huggingface(wrong, "writer", "label")
        with raises_field("dataset", DataError):
            FederatedData.from_huggingface(dataset, "writer", "label", test=wrong)
    ragged = datasets.Dataset.from_dict({"tokens": [[1, 2], [1]], "label": [0, 1], "writer": ["a", "b"]})
    with raises_field("tokens", DataError):
        FederatedData.from_huggingface(ragged, "writer", "label")
