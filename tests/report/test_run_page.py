"""The page of runs as a file: what it may have in it, its size, and numbers that are those of the tables."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from experiment_helpers import command
from report_runs import HOSTILE, VARIANTS, write_page_run

from fedhdp.errors import RunError
from fedhdp.experiments import Variant
from fedhdp.mechanism import SERVER
from fedhdp.privacy.accounting import compose, format_epsilon
from fedhdp.privacy.attack import attack_curve
from fedhdp.privacy.costs import privacy_cost
from fedhdp.report.charts import DASHES
from fedhdp.report.rows import read_study
from fedhdp.report.run_page import run_page, write_run_page
from fedhdp.results import VariantDirectory, read_value, write_value
from fedhdp.results.metrics import half_interval
from fedhdp.results.schema import Summary
from fedhdp.results.store import write_arrays


def embedded(page: str) -> dict:
    """The numbers that the page's script reads."""
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def with_other_clients(run: Path, copy: Path) -> Path:
    """A copy of a run in which everything differs that was measured on clients' data."""
    shutil.copytree(run, copy)
    for path in copy.glob("*/scores.npz"):
        write_arrays(path, {"personal/accuracy": np.full(20, 0.75, np.float32)})
    for path in copy.glob("*/history.csv"):
        part = VariantDirectory(path.parent)
        part.rewrite_history(
            row if row.group == SERVER else row._replace(value=row.value / 3) for row in part.history()
        )
    summary = read_value(copy / "summary.json", Summary)
    for variant in summary.variants:
        for group in variant.groups:
            group.values, group.refused = {key: value / 3 for key, value in group.values.items()}, group.refused + 5
    write_value(copy / "summary.json", summary)
    return copy


def test_public_page_does_not_depend_on_clients_data(tmp_path):
    run = write_page_run(tmp_path / "run")
    other = with_other_clients(run, tmp_path / "copy" / "run")
    assert run_page([run]) != run_page([other])
    assert run_page([run], public=True) == run_page([other], public=True)
    assert not re.search(r'class="mark (clients|mixed)"', run_page([run], public=True))


def test_head_marks_what_was_measured_on_clients(tmp_path):
    run = write_page_run(tmp_path / "run")
    details = re.findall(r'<p class="details">(.*?)</p>', run_page([run]))
    assert [text.count('class="mark clients"') for text in details] == [1]
    assert 'class="mark' not in re.findall(r'<p class="headline">(.*?)</p>', run_page([run]))[0]
    clients = write_page_run(tmp_path / "other", server_has_client_data=True)
    assert 'class="mark clients"' in re.findall(r'<p class="headline">(.*?)</p>', run_page([clients]))[0]


def test_provenance_tells_runs_apart_and_not_where_they_lay(tmp_path):
    runs = [write_page_run(tmp_path / name / "run", seed=seed) for seed, name in enumerate("abcde")]
    two, five = run_page(runs[:2]), run_page(runs)
    codes = [f"<code>fedhdp run {name}/run/experiment.toml</code>" for name in "ab"]
    assert "; ".join(codes) in two
    assert f"{'; '.join(codes)}; and 3 more" in five
    assert str(tmp_path) not in five
    assert "<code>make table</code>" in run_page(runs, commands=["make table"])


def test_lines_of_one_algorithm_differ(tmp_path):
    variants = tuple(Variant(f"FedHDP {number}") for number in range(10))
    rows = read_study([write_page_run(tmp_path / "run", variants=variants)]).rows
    assert {row.style.partition(" ")[0] for row in rows} == {"c-fedhdp"}
    assert len({(row.style, row.dash % len(DASHES)) for row in rows}) == len(rows)


def test_titles_name_a_row_once(tmp_path):
    page = run_page([write_page_run(tmp_path / "run", variants=VARIANTS[1:2])])  # the main row is the rival too
    [title] = re.findall(r"<h3>Server&#x27;s test set: (.*?)</h3>", page)
    assert title.count("DP-FedAvg") == 1


def test_public_page_keeps_what_epsilon_covers(tmp_path):
    page = run_page([write_page_run(tmp_path / "run")], public=True)
    charts = embedded(page)["charts"]
    assert {"attack-0", "server", "epsilon-0", "clip-0"} <= charts.keys()
    assert {line["n"] for line in charts["server"]["lines"]} == {"DP-FedAvg", "FedHDP"}  # Non-Private covers nobody


@pytest.mark.parametrize("change", [{"repeatable": True}, {"server_has_client_data": True}])
def test_server_is_left_out_where_nothing_covers_it(tmp_path, change):
    run = write_page_run(tmp_path / "run", **change)
    assert "server" in embedded(run_page([run]))["charts"]
    assert "server" not in embedded(run_page([run], public=True))["charts"]
    assert 'class="mark clients"' in run_page([run]).partition("Server&#x27;s test set: ")[2][:400]


def test_several_seeds_cost_more_than_one(tmp_path):
    runs = [write_page_run(tmp_path / str(seed), seed=seed, variants=VARIANTS[2:]) for seed in (0, 1)]
    assert "runs of several seeds cost as much as" in run_page(runs, public=True)
    assert "several seeds cost" not in run_page(runs[:1], public=True)


def test_weight_that_falls_to_zero_covers_nothing(tmp_path):
    """The last round's weight says nothing of the rounds before, in which clients had weight and no noise."""
    run = write_page_run(tmp_path / "run")
    summary = read_value(run / "summary.json", Summary)
    for group in summary.variants[0].groups:  # Non-Private
        group.weight = 0.0
    write_value(run / "summary.json", summary)
    assert [row.covered for row in read_study([run]).rows] == [False, True, True]


def test_results_without_a_word_on_the_server_are_not_public(tmp_path):
    run = write_page_run(tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    for variant in summary["variants"]:
        del variant["server_has_client_data"]
    (run / "summary.json").write_text(json.dumps(summary))
    assert "server" not in embedded(run_page([run], public=True))["charts"]


def test_names_are_escaped(tmp_path):
    variants = tuple(Variant(f"{number} {name}") for number, name in enumerate(HOSTILE))
    page = run_page([write_page_run(tmp_path / "run", variants=variants)])
    assert "<script>alert" not in page
    assert "</script><b>" not in page
    assert page.count("<script") == page.count("</script>") == 2
    assert {line["n"] for line in embedded(page)["charts"]["server"]["lines"]} == {v.name for v in variants}


def test_page_of_500_rounds_is_small(tmp_path):
    variants = (*VARIANTS, Variant("HDP-FedAvg", "hdp_fedavg"))
    runs = [write_page_run(tmp_path / str(seed), seed=seed, rounds=500, every=1, variants=variants) for seed in (0, 1)]
    path = write_run_page(runs, tmp_path / "page.html")
    assert path.stat().st_size <= 1.5e6
    points = [len(line["p"]) for chart in embedded(path.read_text())["charts"].values() for line in chart["lines"]]
    assert max(points) <= 250
    assert embedded(path.read_text())["charts"]["server"]["lines"][0]["p"][-1][0] == 500


def test_privacy_numbers_are_those_of_the_results(tmp_path):
    run = write_page_run(tmp_path / "run")
    page, summary = run_page([run]), read_value(run / "summary.json", Summary)
    group = summary.variants[-1].groups[1]
    data = embedded(page)["charts"]
    [line] = data["epsilon-0"]["lines"]
    assert line["p"][-1] == [12, float(f"{group.epsilon:.4g}")]
    assert line["t"][-1] == f"ε {format_epsilon(group.epsilon, 3)}"
    [costs] = [row.costs("private") for row in read_study([run]).rows if row.name == "FedHDP"]
    curve = next(line for line in data["attack-0"]["lines"] if "FedHDP" in line["n"])
    assert curve["p"][20][1] == pytest.approx(100 * attack_curve(costs, "pld").true_positive_rates[20], rel=1e-3)


def test_cost_that_does_not_compose_to_the_epsilon_is_not_drawn(tmp_path):
    run = write_page_run(tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    summary["variants"][2]["groups"][1]["epsilon"] *= 1.5  # rounds that were run again, or other weights
    (run / "summary.json").write_text(json.dumps(summary))
    lines = embedded(run_page([run]))["charts"]["epsilon-0"]["lines"]
    assert sorted(len(line["p"]) for line in lines)[0] == 1


def test_unclipped_share_is_the_one_that_moved_the_clip(tmp_path):
    page = run_page([write_page_run(tmp_path / "run")])
    chart = embedded(page)["charts"]["unclipped"]
    shares = [y for line in chart["lines"] for _, y in line["p"]]
    expected = 100 * (0.5 + 1 / (12 * 0.2))  # the clip falls by e^(-1/12) a round: quantile 0.5, learning rate 0.2
    assert shares == pytest.approx([expected] * len(shares), rel=1e-3)


def test_tenths_of_a_group_are_means_over_its_clients(tmp_path):
    runs = [write_page_run(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    charts = embedded(run_page(runs))["charts"]
    [line] = charts["tenths-0"]["lines"]  # three variants with the same scores
    assert [x for x, _ in line["p"]] == list(range(10))
    private = [number / 20 for number in range(5, 20)]  # of 15 clients, the worst tenth is one
    assert line["p"][0][1] == pytest.approx(100 * 0.95 * private[0], rel=1e-3)
    assert line["p"][9][1] == pytest.approx(100 * 0.95 * (private[-1] + private[-2]) / 2, rel=1e-3)
    assert line["h"][0] == pytest.approx(100 * half_interval([private[0], 0.9 * private[0]]), rel=1e-3)
    assert "tenths-1" not in charts  # five clients
    assert "tenths-0" not in embedded(run_page(runs, public=True))["charts"]


def test_intervals_of_a_rate_end_at_0_and_100_percent(tmp_path):
    charts = embedded(run_page([write_page_run(tmp_path / str(seed), seed=seed) for seed in (0, 1)]))["charts"]
    for chart in (charts["tenths-0"], charts["personal-0"]):
        assert chart["lim"] == [0, 100]
        assert 0 <= chart["y"][0] < chart["y"][1] <= 100
    assert charts["clip-0"]["lim"] is None


def test_published_numbers_are_lines(tmp_path):
    run = write_page_run(tmp_path / "run")
    path = write_run_page([run], tmp_path / "page.html", published=[("paper: FedHDP", 93.5), ("paper: DP", 88.3)])
    server = path.read_text().partition('id="server"')[2].partition("</figure>")[0]
    assert "paper: FedHDP</bdi><b>93.5%</b>" in server
    dashes = re.findall(r'class="reference" stroke-dasharray="([^"]+)"', server)
    assert len(dashes) == 4  # in the chart and in its legend
    assert len(set(dashes)) == 2


def test_rounds_are_whole_numbers_on_an_axis(tmp_path):
    page = run_page([write_page_run(tmp_path / "run", rounds=3, every=3)])  # one evaluation
    [chart] = re.findall(r'<svg[^>]*id="server".*?</svg>', page)
    labels = re.findall(r'text-anchor="(?:middle|end)">([^<]+)</text>', chart.partition('class="tick"')[2])
    assert labels == ["3"]


def test_run_under_way_has_a_page(tmp_path):
    run = write_page_run(tmp_path / "run", finished=False)
    page = run_page([run])
    finished = run_page([write_page_run(tmp_path / "other")])
    assert "under way" in page
    assert embedded(page)["charts"]["server"] == embedded(finished)["charts"]["server"]
    assert embedded(page)["charts"]["epsilon-0"] == embedded(finished)["charts"]["epsilon-0"]


def test_run_under_way_counts_the_rounds_that_ran_again_after_a_crash(tmp_path):
    run = write_page_run(tmp_path / "run", finished=False)
    state = {"variants": np.array(["DP-FedAvg", "FedHDP"]), "replayed_rounds": np.arange(5)}
    write_arrays(run / "dp-fedavg" / "checkpoint.npz", state)
    private = read_study([run]).rows[2].group("private")
    assert private.rounds == 17
    mechanism = read_study([run]).rows[2].mechanism
    assert private.epsilon == compose([privacy_cost(mechanism, mechanism.groups[1], 17)], private.delta, "pld")


def test_run_without_measurements_is_refused(tmp_path):
    run = write_page_run(tmp_path / "run", finished=False)
    for path in run.glob("*/history.csv"):
        path.unlink()
    with pytest.raises(RunError, match="no results yet"):
        run_page([run])


def test_deployment_has_a_page(tmp_path):
    run = write_page_run(tmp_path / "run", finished=False, variants=VARIANTS[2:])
    levels = {"opted out": {"noise_multiplier": 0.0}, "private": {"epsilon": 8.0}}
    settings = {"levels": {name: level | {"sampling_rate": 0.3} for name, level in levels.items()}}
    head = {"name": "clinics", "rounds": 12, "clip": {"initial": 0.5}}
    (run / "experiment.toml").write_text(tomli_w.dumps(head | settings))
    part = VariantDirectory(run / "fedhdp")
    epsilons = [
        row._replace(group="private", metric="epsilon", value=row.round / 2)
        for row in part.history()
        if row.metric == "clip"
    ]
    part.append_history(epsilons)
    charts = embedded(run_page([run]))["charts"]
    assert [y for _, y in charts["epsilon-0"]["lines"][0]["p"]] == [2.0, 4.0, 6.0]


def test_command_writes_the_page_and_prints_its_path(tmp_path, monkeypatch):
    run = write_page_run(tmp_path / "run")
    done = command("report", run)
    assert (done.code, done.stdout) == (0, f"{run / 'report.html'}\n")
    public = command("report", run, "--public")
    assert public.stdout == f"{run / 'report-public.html'}\n"
    assert 'class="mark clients"' not in (run / "report-public.html").read_text()
    monkeypatch.chdir(tmp_path)
    other = write_page_run(tmp_path / "other", seed=1)
    assert command("report", run, other).stdout == "report.html\n"
    assert "mean of 2 seeds" in Path("report.html").read_text()
    refused = command("report", tmp_path)
    assert (refused.code, refused.stderr.count("\n")) == (2, 1)
