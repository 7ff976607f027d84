"""Tables as inputs: numbers and categories, whose statistics are used, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import raises_field
from hypothesis import given
from hypothesis import strategies as st

from fedhdp.data import FederatedData
from fedhdp.errors import DataError, FedHDPError

RNG = np.random.default_rng(0)
CLINIC = np.array(["A", "B", "C"])[np.arange(30) % 3]
LEVEL = np.array(["open", "mild", "strict"])[np.arange(30) % 3]
TABLE = {
    "clinic": CLINIC,
    "privacy": LEVEL,
    "age": RNG.normal(50, 10, 30),
    "visits": RNG.integers(0, 9, 30),
    "smoker": RNG.integers(0, 2, 30).astype(bool),
    "sex": np.array(["f", "m"])[RNG.integers(0, 2, 30)],
    "sick": np.array(["no", "yes"])[RNG.integers(0, 2, 30)],
}
COLUMNS = {"client": "clinic", "label": "sick", "level": "privacy"}
SEX = {"categories": {"sex": ["m", "f"]}}


def table(**changes: object) -> dict[str, np.ndarray]:
    return TABLE | {name: np.asarray(values) for name, values in changes.items()}


def with_cell(column: str, row: int, value: object) -> dict[str, np.ndarray]:
    cells = TABLE[column].astype(object)
    cells[row] = value
    return table(**{column: cells})


def inputs_of(data: FederatedData, client: int) -> np.ndarray:
    return data.train.x_N[data.train.start_K[client] :][: data.train.count_K[client]]


def test_columns_become_inputs():
    data = FederatedData.from_dataframe(TABLE, **COLUMNS, **SEX, test=None)
    rows = np.flatnonzero(CLINIC == "B")
    columns = [TABLE[name] for name in ("age", "visits", "smoker")] + [TABLE["sex"] == "m", TABLE["sex"] == "f"]
    np.testing.assert_allclose(inputs_of(data, 1), np.stack(columns, axis=1)[rows], rtol=1e-6)
    assert (data.levels.tolist(), data.class_names, data.preparation) == (["open", "mild", "strict"], ("no", "yes"), "")
    some = FederatedData.from_dataframe(TABLE, **COLUMNS, features=["visits"], test=None)
    assert some.train.x_N.shape == (30, 1)
    ages = FederatedData.from_dataframe(TABLE, "clinic", "age", {"A": "x", "B": "y", "C": "y"}, features=["visits"])
    assert (ages.train.y_N.shape[1:], ages.classes, ages.levels.tolist()) == ((1,), 1, ["x", "y", "y"])


@pytest.mark.parametrize("kind", ["pandas", "nullable", "pyarrow"])
def test_kinds_of_frames(kind):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(TABLE)
    if kind == "nullable":
        frame = frame.astype({"visits": "Int64", "sex": "category", "age": object})
    if kind == "pyarrow":
        frame = pytest.importorskip("pyarrow").Table.from_pandas(frame)
    data, same = (FederatedData.from_dataframe(rows, **COLUMNS, **SEX) for rows in (frame, TABLE))
    np.testing.assert_array_equal(data.train.x_N, same.train.x_N)
    np.testing.assert_array_equal(data.test.y_N, same.test.y_N)


def test_column_of_arrays_is_taken_as_it_is():
    tokens = {"clinic": CLINIC, "sick": TABLE["sick"], "tokens": RNG.integers(0, 9, (30, 4)).astype(np.int16)}
    data = FederatedData.from_dataframe(tokens, "clinic", "sick", test=None)
    assert data.train.x_N.dtype == np.int16
    np.testing.assert_array_equal(inputs_of(data, 0), tokens["tokens"][CLINIC == "A"])


def test_standardized_by_those_who_opted_out():
    data = FederatedData.from_dataframe(TABLE, **COLUMNS, standardize="public", public=["open"])
    np.testing.assert_allclose(inputs_of(data, 0)[:, :3].mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(inputs_of(data, 0)[:, :2].std(axis=0), 1, atol=1e-6)
    assert "open" in data.preparation


@given(st.integers(0, 2**32 - 1))
def test_private_rows_change_no_other_clients_inputs(seed):
    """Whatever a private client has, in whatever number, the inputs of the others stay the same to the bit."""
    rng = np.random.default_rng(seed)
    kept = CLINIC != "C"
    count = int(rng.integers(1, 20))
    other = {name: np.concatenate([cells[kept], rng.choice(cells, count)]) for name, cells in TABLE.items()}
    other["age"][kept.sum() :] = rng.normal(0, 1e6, count)
    other["sex"] = other["sex"].astype("<U5")
    other["sex"][kept.sum()] = "other"
    other["clinic"][kept.sum() :], other["privacy"][kept.sum() :] = "C", "strict"
    moments = {"age": (50.0, 10.0)}
    for options in ({"standardize": "public", "public": ["open"]}, {"standardize": moments} | SEX):
        first = FederatedData.from_dataframe(TABLE, **COLUMNS, **options)
        if options["standardize"] != "public":
            other["sex"][kept.sum()] = "f"
        second = FederatedData.from_dataframe(other, **COLUMNS, **options)
        for client in (0, 1):
            np.testing.assert_array_equal(inputs_of(first, client), inputs_of(second, client))


def test_standardized_by_given_numbers_or_the_server():
    given_moments = FederatedData.from_dataframe(
        TABLE, **COLUMNS, **SEX, test=None, standardize={"age": (40.0, 5.0)}, features=["age", "visits", "sex"]
    )
    np.testing.assert_allclose(inputs_of(given_moments, 0)[:, 0], (TABLE["age"][CLINIC == "A"] - 40) / 5, rtol=1e-6)
    np.testing.assert_allclose(inputs_of(given_moments, 0)[:, 1], TABLE["visits"][CLINIC == "A"])
    server = {name: cells[:7] for name, cells in TABLE.items()}
    data = FederatedData.from_dataframe(TABLE, **COLUMNS, server=server, standardize="server")
    np.testing.assert_allclose(data.server_x_N[:, 0].mean(), 0, atol=1e-6)
    assert data.server_x_N.shape == (7, 5)
    assert "7 examples" in data.preparation


def test_constant_column_of_the_public_rows_has_no_deviation():
    constant = table(visits=np.where(CLINIC == "A", 3, TABLE["visits"]))
    data = FederatedData.from_dataframe(constant, **COLUMNS, test=None, standardize="public", public=["open"])
    np.testing.assert_allclose(inputs_of(data, 1)[:, 1], TABLE["visits"][CLINIC == "B"] - 3)


def test_missing_values_are_filled_by_given_ones():
    cells = with_cell("age", 3, None) | {"sex": with_cell("sex", 6, None)["sex"]}
    options = {"fill": {"age": 50, "sex": "f"}, "categories": {"sex": ["f", "m"]}, "test": None}
    data = FederatedData.from_dataframe(cells, **COLUMNS, **options)
    assert inputs_of(data, 0)[1, 0] == 50
    assert inputs_of(data, 0)[2, 3:].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("frame", "options", "field", "value"),
    [
        (TABLE, {"client": "clinik"}, "client", "clinik"),
        (TABLE, {"client": CLINIC}, "client", "ndarray"),
        (TABLE, {"label": "clinic"}, "label", "clinic"),
        (TABLE, {"label": "privacy"}, "label", "privacy"),
        (TABLE, {"features": ["age", "age"], "categories": {}}, "features", "age"),
        (with_cell("age", 7, 1e300), {}, "age", 1e300),
        (TABLE, {"label": "ill"}, "label", "ill"),
        (TABLE, {"level": "privat"}, "level", "privat"),
        (TABLE, {"features": ["height"], "categories": {}}, "features", "height"),
        (TABLE, {"features": []}, "features", []),
        (TABLE, {"features": ["age", "sick"], "categories": {}}, "features", "sick"),
        (TABLE, {"classes": ["no", "no"]}, "classes", ["no", "no"]),
        (TABLE, {"categories": {}}, "sex", TABLE["sex"][0]),
        (TABLE, {"categories": {"sx": ["f", "m"]}}, "categories", "sx"),
        (TABLE, {"categories": {"sex": ["f"]}}, "sex", "m"),
        (TABLE, {"fill": {"height": 1}}, "fill", "height"),
        (TABLE, {"standardize": "private"}, "standardize", "private"),
        (TABLE, {"standardize": "public"}, "standardize", "public"),
        (TABLE, {"standardize": "public", "public": ["nobody"]}, "standardize", "public"),
        (TABLE, {"standardize": "server"}, "standardize", "server"),
        (TABLE, {"standardize": "server", "server": 0.2}, "standardize", "server"),
        (TABLE, {"standardize": {"weight": (0, 1)}}, "standardize", "weight"),
        (TABLE, {"standardize": {"sex": (0, 1)}}, "standardize", "sex"),
        (TABLE, {"standardize": {"age": (0, 0)}}, "standardize.age", [0, 0]),
        (TABLE, {"test": {"sick": TABLE["sick"]}}, "features", "age"),
        (TABLE, {"standardize": "server", "server": {"age": TABLE["age"]}}, "server", "sick"),
        (TABLE, {"standardize": "server", "server": {"sick": TABLE["sick"]}}, "features", "age"),
        (TABLE, {"test": "test.csv"}, "frame", "str"),
        ({}, {}, "frame", []),
        (7, {}, "frame", "int"),
        (table(age=[]), {}, "frame", [0, 30]),
        (with_cell("age", 7, None), {}, "age", None),
        (with_cell("age", 7, float("nan")), {}, "age", None),
        (with_cell("age", 7, float("inf")), {}, "age", float("inf")),
        (with_cell("age", 7, "old"), {}, "age", "old"),
        (with_cell("sex", 7, None), {}, "sex", None),
        (with_cell("clinic", 7, None), {}, "clinic", None),
        (with_cell("sick", 7, ""), {}, "sick", ""),
        (with_cell("privacy", 7, "none"), {}, "level", "none"),
        (table(age=np.array(["2020-01-01"] * 30, "datetime64[D]")), {}, "age", "datetime64[D] (30,)"),
    ],
)
def test_wrong_tables_are_refused(frame, options, field, value):
    with raises_field(field, FedHDPError) as error:
        FederatedData.from_dataframe(frame, **(COLUMNS | SEX | options))
    assert error.value.value == value


def test_wrong_cells_are_named_by_column_row_and_client():
    where = f"row 8, of client '{TABLE['clinic'][7]}'"
    for value in (None, "old", float("inf"), float("nan")):
        with pytest.raises(DataError, match=rf"^age .* {where}"):
            FederatedData.from_dataframe(with_cell("age", 7, value), **COLUMNS, **SEX)
    with pytest.raises(DataError, match=rf"^test: age .* {where}"):
        FederatedData.from_dataframe(TABLE, **COLUMNS, **SEX, test=with_cell("age", 7, "old"))


def test_rows_of_errors_are_the_tables():
    frame = with_cell("age", 21, None)  # of clinic A, whose rows are the source of the statistics
    with pytest.raises(DataError, match="row 22"):
        FederatedData.from_dataframe(frame, **COLUMNS, standardize="public", public=["open"])
    with pytest.raises(DataError, match="server: age is missing in row 22"):
        FederatedData.from_dataframe(TABLE, **COLUMNS, standardize="server", server=frame)
