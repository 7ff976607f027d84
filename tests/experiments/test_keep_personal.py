"""Personal models that are kept: every client's, by id, read from the file when asked for."""

from __future__ import annotations

import numpy as np
import pytest
from experiment_helpers import command, keep_going, tiny
from helpers import raises_field
from msgspec.structs import replace

from fedhdp.errors import InvalidValueError, RunError
from fedhdp.experiments import run
from fedhdp.models import name_parameters, unname_parameters
from fedhdp.results import DamagedRunError, PersonalModels, load_model, load_personal, read_arrays


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The directory of a run of three rounds, written three clients at a time."""
    directory = tmp_path_factory.mktemp("kept") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedhdp.experiments.batch.PERSONAL_PART", 3)
        run(tiny(rounds=3, keep_personal=True), directory, keep_going)
    return directory


def test_models_give_the_scores_of_the_table(kept):
    experiment = tiny()
    data = experiment.data.load(experiment.mechanism, experiment.seed)
    model = experiment.model.build(784, data.classes)
    scores = read_arrays(kept / "fedhdp" / "scores.npz")
    personal = next(array for name, array in scores.items() if name.startswith("personal"))
    models = PersonalModels(kept, "FedHDP")
    assert list(models) == data.ids.tolist()
    assert isinstance(models.rows, np.memmap)
    start_K = np.concatenate([[0], np.cumsum(data.test.count_K)])
    scale = np.float32(1.0 if data.input_scale is None else data.input_scale)
    for number, arrays in enumerate(models.values()):
        part = slice(start_K[number], start_K[number + 1])
        logits = model.apply(unname_parameters(model, arrays), np.float32(data.test.x_N[part]) * scale, None)
        accuracy = np.mean(np.argmax(logits, axis=1) == data.test.y_N[part])
        assert accuracy == pytest.approx(personal[number], abs=1e-6)


def test_client_who_never_took_part_has_the_global_model(tmp_path):
    groups = tuple(replace(group, sampling_rate=0.01) for group in tiny().mechanism.groups)
    mechanism = replace(tiny().mechanism, groups=groups)
    run(tiny(rounds=1, keep_personal=True, mechanism=mechanism), tmp_path / "run", keep_going)
    expected = load_model(tmp_path / "run", "FedHDP")
    same = [
        all(np.array_equal(arrays[name], expected[name]) for name in expected)
        for arrays in PersonalModels(tmp_path / "run", "FedHDP").values()
    ]
    assert sum(same) >= 15


def test_parameters_are_the_models(kept):
    model = tiny().model.build(784, 10)
    arrays = load_personal(kept, 3, "FedHDP")
    named = name_parameters(unname_parameters(model, arrays))
    for name in arrays:
        np.testing.assert_array_equal(named[name], arrays[name])


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("99", "FedHDP"), "client_id"),
        (("3", "nosuch"), "variant"),
        (("3", None), "variant"),
    ],
)
def test_unknown_names_are_refused(arguments, field, kept):
    with raises_field(field, RunError):
        load_personal(kept, *arguments)


def test_run_without_personal_models_is_refused(finished_run, tmp_path):
    with raises_field("keep_personal", RunError):
        load_personal(finished_run, "0", "FedHDP")
    with raises_field("model", RunError):
        load_model(finished_run, "FedHDP", "average")
    with raises_field("directory", RunError):
        load_model(tmp_path)


def test_torn_file_is_refused(kept, tmp_path):
    import shutil

    shutil.copytree(kept, tmp_path / "run")
    path = tmp_path / "run" / "fedhdp" / "personal_models.npy"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DamagedRunError):
        load_personal(tmp_path / "run", "0", "FedHDP")


def test_a_changed_number_is_not_a_personal_model(kept, tmp_path):
    """A bit of a model, the type of all of them, and the order of the clients, which says whose they are."""
    import shutil

    shutil.copytree(kept, tmp_path / "run")
    path, clients = tmp_path / "run" / "fedhdp" / "personal_models.npy", tmp_path / "run" / "clients.csv"
    content, lines = path.read_bytes(), clients.read_text().splitlines(keepends=True)
    expected = load_personal(tmp_path / "run", "1", "FedHDP")
    bit_flipped = bytearray(content)
    bit_flipped[len(content) - 7] ^= 1
    path.write_bytes(bit_flipped)
    with pytest.raises(DamagedRunError):
        load_personal(tmp_path / "run", list(PersonalModels(tmp_path / "run", "FedHDP"))[-1], "FedHDP")
    for name, array in load_personal(tmp_path / "run", "1", "FedHDP").items():  # other rows are as they were
        np.testing.assert_array_equal(array, expected[name])
    path.write_bytes(content.replace(b"'<f4'", b"'>f4'"))
    with pytest.raises(DamagedRunError):
        load_personal(tmp_path / "run", "1", "FedHDP")
    path.write_bytes(content)
    clients.write_text("".join([lines[0], lines[2], lines[1], *lines[3:]]))
    with pytest.raises(DamagedRunError):
        load_personal(tmp_path / "run", "1", "FedHDP")


def test_run_that_does_not_personalize_keeps_none(tmp_path):
    training = replace(tiny().training, personalize=False)
    with raises_field("keep_personal", InvalidValueError):
        tiny(keep_personal=True, training=training)
    (tmp_path / "x.toml").write_text('name = "x"\nkeep_personal = "all"\nrounds = 1')
    assert "keep_personal" in command("run", tmp_path / "x.toml").stderr
