"""Results as tables with the paper's columns."""

from __future__ import annotations

import math

from helpers import raises_field
from msgspec.structs import replace

from fedhdp.results.schema import ACCURACY, GroupResult, MetricInfo, VariantResult
from fedhdp.results.tables import footnotes, format_table, table_cells


def group(name: str, **fields: object) -> GroupResult:
    """An unprotected group with accuracy 0.5 and variance 0.01."""
    values = {"global/accuracy": 0.5, "global/accuracy_variance": 0.01} | fields.pop("values", {})
    defaults = {"epsilon": math.inf, "values": values}
    return GroupResult(name, 5, True, 0.0, 0.1, 1.0, 0.1, **(defaults | fields))  # type: ignore[arg-type]


def variant(*groups: GroupResult, **fields: object) -> VariantResult:
    """A variant of two groups."""
    values = {"global/accuracy": 0.5} | fields.pop("values", {})
    defaults = {"repeatable": False, "groups": list(groups or (group("a"), group("b"))), "values": values}
    return VariantResult("plain", "fedhdp", 3, 1.0, **(defaults | fields))  # type: ignore[arg-type]


def test_columns_without_personal_models():
    header, (row,) = table_cells([variant()])
    assert header == ["algorithm", "Acc_g", "g: b", "g: a", "Δ_g", "ε b", "ε a"]
    assert row == ["plain", "50.00", "50.00 (1.00)", "50.00 (1.00)", "0.00", "∞", "∞"]


def test_server_without_a_test_set_has_no_column():
    header, (row,) = table_cells([replace(variant(), values={})])
    assert header == ["algorithm", "g: b", "g: a", "Δ_g", "ε b", "ε a"]
    assert len(row) == len(header)


def test_columns_of_averaged_and_chosen_models():
    chosen = {"chosen/accuracy": 0.75, "chosen/accuracy_variance": 0.02}
    groups = [group(name, values=chosen) for name in "ab"]
    header, (row,) = table_cells([variant(*groups, values={"average/accuracy": 0.625})])
    assert header == ["algorithm", "Acc_g", "Acc_avg", "g: b", "g: a", "Δ_g", "c: b", "c: a", "Δ_c", "ε b", "ε a"]
    assert (row[2], row[6], row[8]) == ("62.50", "75.00 (2.00)", "0.00")


def test_columns_of_an_error():
    errors = {"a": 12.345678, "b": 1234.5678}
    groups = [group(name, values={"global/mse": error, "global/mse_variance": 0.25}) for name, error in errors.items()]
    metrics = (MetricInfo("mse", higher_is_better=False), ACCURACY)
    table = [variant(*groups, values={"global/mse": 0.5}, metrics=metrics)]
    header, (row,) = table_cells(table)
    assert header[:5] == ["algorithm", "mse_g", "g: b", "g: a", "Δ_g"]
    assert row[1:5] == ["0.5", "1235 (0.25)", "12.35 (0.25)", "1222"]  # a is the better off
    assert table_cells(table, metric="accuracy") == table_cells([variant(*groups)])
    with raises_field("metric"):
        table_cells(table, metric="auc")


def test_no_single_epsilon_is_printed_for_a_mixed_run():
    promised = {"mild": 8.0, "strict": 1.0}
    groups = [group("open"), *(replace(group(n, epsilon=e), unprotected=False) for n, e in promised.items())]
    header, (row,) = table_cells([variant(*groups)])
    epsilons = {name: cell for name, cell in zip(header, row, strict=True) if "ε" in name}
    assert epsilons == {"ε open": "∞", "ε mild": "8.00", "ε strict": "1.00"}


def test_epsilon_cells():
    groups = [replace(group("a", epsilon=1.2345), unprotected=False)]
    groups += [replace(group("b", epsilon=None), unprotected=False)]
    _, (row,) = table_cells([variant(*groups)])
    assert row[-2:] == ["–", "1.24"]  # rounded up


def test_several_seeds_are_means():
    seeds = [[variant(values={"global/accuracy": accuracy})] for accuracy in (0.5, 0.6, 0.7)]
    _, (row,) = table_cells(seeds[0], other_seeds=seeds[1:])
    assert row[1] == "60.00 ±24.84"


def test_footnotes():
    first = group("a", epsilon=1.2, epsilon_basis="delta 1e-05", refused=2)
    notes = footnotes([variant(first, stopped="budget"), replace(variant(first), name="other", repeatable=True)])
    assert notes[0] == "ε a = 1.200: delta 1e-05 [plain; other]"
    assert notes[1] == "plain: stopped after round 3: budget"
    assert len(notes) == 5


def test_footnotes_say_how_many_clients_count():
    metrics = (MetricInfo("auc", percent=True),)
    groups = [
        group(name, values={"global/auc": 0.5, "global/auc_clients": count}) for name, count in (("a", 5), ("b", 3))
    ]
    (note,) = footnotes([variant(*groups, metrics=metrics), replace(variant(*groups, metrics=metrics), name="other")])
    assert note.startswith("auc counts these clients: 3 of 5 of b;")
    fewer = [groups[0], group("b", values={"global/auc": 0.5, "global/auc_clients": 2})]
    (note,) = footnotes([variant(*groups, metrics=metrics), variant(*fewer, metrics=metrics)])  # two seeds
    assert note.startswith("auc counts these clients: 2 to 3 of 5 of b;")
    assert footnotes([variant(*groups, metrics=metrics)], metric="f1") == []  # the table's metric, which all have


def test_footnotes_about_many_variants_are_short():
    same = [group(name, epsilon=1.2, epsilon_basis="delta 1e-05") for name in "ab"]
    (note,) = footnotes([replace(variant(*same), name=f"row {number}") for number in range(9)])
    assert note == "ε a, b = 1.200: delta 1e-05 [row 0; row 1; and 7 more]"


def test_averaged_model_without_a_server_test_set():
    groups = [group(name, values={"global/accuracy": 0.5, "average/accuracy": 0.625}) for name in "ab"]
    header, (row,) = table_cells([replace(variant(*groups), values={})], variances=False)
    assert dict(zip(header, row, strict=True))["a: b"] == "62.50"
    assert "Acc_g" not in header


def test_text_has_rows_and_footnotes():
    lines = format_table([variant(repeatable=True)]).split("\n")
    assert len(lines) == 6
    assert lines[5:] == footnotes([variant(repeatable=True)])


def test_text_names_the_metric_and_its_columns():
    """Also where the server has no test set, whose column would name it."""
    errors = {"global/mse": 0.5, "personal/mse": 0.25}
    groups = [group(name, values=errors) for name in "ab"]
    metrics = (MetricInfo("mse", higher_is_better=False), ACCURACY)
    table = [replace(variant(*groups, metrics=metrics), values={})]
    assert format_table(table).startswith("mse, variance across clients in parentheses\ng and l: clients' own data")
    accuracies = format_table(table, metric="accuracy")
    assert accuracies.startswith(
        "accuracy in %, variance across clients in parentheses\ng: clients' own data, with the global"
    )


def test_empty_table_is_refused():
    with raises_field("variants"):
        format_table([])


def test_variants_must_have_the_same_groups():
    with raises_field("groups of 'plain'"):
        table_cells([variant(), variant(group("c"), group("b"))])


def test_epsilon_asked_beside_epsilon_had():
    had = [group("a", epsilon=2.961, epsilon_target=3.0), group("b", epsilon=0.5, epsilon_target=math.inf)]
    groups = [replace(value, unprotected=False) for value in had]
    _, (row,) = table_cells([variant(*groups)])
    assert row[-2:] == ["∞ → 0.50", "3 → 2.97"]
    groups = [group("a", epsilon=math.inf, epsilon_target=3.0), group("b", epsilon=math.inf, epsilon_target=math.inf)]
    _, (row,) = table_cells([variant(*groups)])
    assert row[-2:] == ["∞", "3 → ∞"]


def test_footnotes_say_why_a_group_has_more_privacy():
    covered = replace(group("a", epsilon=1.0, epsilon_target=3.0, surplus="why"), unprotected=False)
    strictest = replace(group("b", epsilon=1.0, epsilon_target=3.0), unprotected=False)
    notes = footnotes([variant(covered), replace(variant(strictest), name="same for all", algorithm="dp_fedavg")])
    assert notes[0] == "ε: asked for → had"
    assert [note for note in notes if "why" in note and note.endswith("[plain]")]
    assert [note for note in notes if "strictest" in note and note.endswith("[same for all]")]
    assert not [note for note in footnotes([variant()]) if "asked" in note]
