"""The drawing of throughput: well-formed, whole, and of the run that was asked for."""

import itertools
import json
from xml.etree import ElementTree

import pytest

from benchmarks import plot
from benchmarks.kit.figures import spread_of
from benchmarks.plot import Axes, Curve

SVG = "{http://www.w3.org/2000/svg}"


def results_of(rate, quantization=""):
    rates = {name: spread_of([0.9 * factor * rate, factor * rate]) for name, factor in (("ideal", 2), ("ours", 1))}
    return {
        "settings": {"dtype": "bfloat16", "quantization": quantization},
        "workload": {"prompt_tokens": 128, "output_tokens": 64},
        "requests": {"1": {"tokens_per_second": rates}, "8": {"tokens_per_second": rates}},
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(plot, "RESULTS", tmp_path)
    return tmp_path


def keep(folder, name, *results, instruction_set="avx2"):
    runs = [{"machine": {"instruction_set": instruction_set}, "results": each} for each in results]
    (folder / f"{name}.json").write_text(json.dumps(runs))


def test_draws_every_curve_with_its_name_and_points():
    curves = plot.curves_of(results_of(100.0))
    root = ElementTree.fromstring(plot.draw("a < b & c", curves))
    assert len(root.findall(f"{SVG}polyline")) == 2
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"a < b & c", "ideal", "ours", "1", "8"} <= set(texts)
    # A point for each number of requests, and one beside each name.
    assert len(root.findall(f"{SVG}circle")) == 2 * (2 + 1)


def test_everything_lies_within_the_picture():
    root = ElementTree.fromstring(plot.draw("title", plot.curves_of(results_of(1234.0))))
    for element in root.iter(f"{SVG}circle"):
        assert 0 <= float(element.get("cx", -1)) <= plot.WIDTH
        assert plot.TOP <= float(element.get("cy", -1)) <= plot.HEIGHT - plot.BOTTOM + plot.LABEL_HEIGHT


def test_names_do_not_lie_upon_each_other():
    curves = [Curve(str(number), {1: spread_of([100.0]), 8: spread_of([100.0])}) for number in range(8)]
    labels = list(plot._labels(Axes(curves), curves, dict.fromkeys(map(str, range(8)), "#000")))
    places = sorted(float(text.split('y="')[1].split('"')[0]) for text in labels if text.startswith("<text"))
    assert all(below - above >= plot.LABEL_HEIGHT - 1e-6 for above, below in itertools.pairwise(places))


def test_one_number_of_requests_is_drawn_too():
    told = results_of(10.0)
    del told["requests"]["8"]
    ElementTree.fromstring(plot.draw("title", plot.curves_of(told)))


@pytest.mark.parametrize(("least", "step"), [(0.3, 0.5), (1.0, 1.0), (11.0, 20.0), (254.0, 500.0), (501.0, 1000.0)])
def test_steps_are_round_numbers(least, step):
    assert plot.nice_step(least) == pytest.approx(step)


def test_takes_the_last_run_of_the_kind(folder):
    keep(folder, "throughput-m", results_of(1.0), results_of(2.0), results_of(3.0, "int8"))
    told = plot.last_runs(folder / "throughput-m.json", "bfloat16")
    assert told["avx2"]["requests"]["1"]["tokens_per_second"]["ours"]["max"] == 2.0
    assert plot.last_runs(folder / "throughput-m.json", "float32") == {}


def test_a_run_beside_peers_counts_first(folder):
    keep(folder, "throughput-m", results_of(1.0))
    keep(folder, "peers-m", {**results_of(2.0), "workload": {"prompt_tokens": 7, "output_tokens": 9}})
    (target,) = plot.plot("m", "bfloat16")
    assert target == folder / "throughput-m-avx2.svg"
    assert "m, bfloat16, avx2, 7 prompt and 9 output tokens" in target.read_text()
    assert plot.plot("other", "bfloat16") == []


def test_runs_of_another_instruction_set_have_a_picture_of_their_own(folder):
    keep(folder, "throughput-m", results_of(1.0), instruction_set="amx")
    keep(folder, "peers-m", results_of(2.0))
    assert [path.name for path in plot.plot("m", "bfloat16")] == ["throughput-m-amx.svg", "throughput-m-avx2.svg"]


def test_runs_from_before_they_named_it_keep_their_picture(folder):
    keep(folder, "peers-m", results_of(2.0), instruction_set="")
    assert plot.plot("m", "bfloat16") == [folder / "throughput-m.svg"]


def test_the_command_draws_all_that_is_kept(folder, monkeypatch, capsys):
    keep(folder, "throughput-a", results_of(1.0))
    keep(folder, "peers-b", results_of(2.0, "int8"))
    monkeypatch.setattr("sys.argv", ["plot.py", "--kind", "int8"])
    plot.main()
    assert capsys.readouterr().out.splitlines() == ["nothing of a in int8", str(folder / "throughput-b-int8-avx2.svg")]
