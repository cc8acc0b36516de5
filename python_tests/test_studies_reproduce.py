"""The list of comparisons with their claims: runs, kept results, messages and the page."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import operator
import re
import shlex
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from test_studies_claims import HERE, published

from bench.studies import __main__ as command_line
from bench.studies import compare, experiments, reproduce, reproduce_pictures, reproduce_report
from bench.studies.claims import CANNOT_TELL, MET, NOT_MET, Auc, Claim, Faster
from bench.studies.compare import DATA_OPTIONS
from bench.studies.experiments import EXPERIMENTS, Experiment
from rec_kernels.dlrm import runs
from rec_kernels.dlrm.config import TrainConfig
from rec_kernels.dlrm.runs import NotFiniteError, RunExistsError, RunInterruptedError

pytestmark = pytest.mark.usefixtures("no_pictures")
ROOT = Path(__file__).parent.parent
SAVEFIG, TRAIN = Figure.savefig, compare.train
OPTIONS = {"data": "dlrm_tiny:tiny", "batch_size": 100, "bottom": (4,), "top": (4,)}


def tiny_experiment(name: str, *configurations: str, **more) -> Experiment:
    small = {"seeds": 2, "minutes": 90.0, "quick_minutes": 1.0, "options": OPTIONS}
    claim = Claim(f"{name} is no worse", "arXiv:1", Auc("b", ("a",)), -1.0, "other data")
    return Experiment(name, "what it shows", (claim,), configurations=configurations, **small | more)


LIST = (
    tiny_experiment("one", "a", "b:lr=0.5"),
    tiny_experiment("two", "a", "b:dense_lr=1e30", "c"),
    tiny_experiment("ratings", "a", "b", needs_path=True),
)


def quick_train(config: TrainConfig, data, **options) -> None:
    """Writes the files of a run without training."""
    directory = runs.create_run(config.runs_dir, config.run, "x")
    runs.write_config(directory, dataclasses.asdict(config), {"on": False, "factor": None})
    record = {"kind": "failed", "step": 1, "cause": "NotFiniteError", "error": "loss is nan"}
    if config.dense_lr < 1:
        table = {"name": "id", "format": "fp32", "num_embeddings": 20, "embedding_dim": 16}
        table |= {"weight_bytes": 1280, "state_bytes": 80}
        score = 0.5 + config.lr / 10 + config.seed / 100
        record = {"kind": "test", "auc": score, "log_loss": 0.6, "examples": 200, "base_rate": 0.5}
        record |= {"normalized_entropy": 0.9, "calibration": 1.0, "accuracy": 0.7, "step": 2, "stopped_early": False}
        record |= {"train_examples": 400, "train_seconds": 0.4, "peak_memory_bytes": 1 << 30}
        record |= {"examples_per_second": 1000.0, "dense_parameters": 10, "tables": [table], "tiers": {}}
        record |= {"flops_per_example": 20, "device": "cpu", "machines": []}
    runs.Records(directory).append(record)
    if record["kind"] == "failed":
        raise NotFiniteError(record["error"])


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs ``reproduce`` on the tiny list; nothing is trained and nothing drawn."""
    monkeypatch.setattr(compare.gc, "collect", lambda: 0)  # no models to collect
    monkeypatch.setattr(reproduce, "EXPERIMENTS", LIST)
    monkeypatch.setattr(compare, "train", quick_train)
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **how: None)
    return lambda *arguments: command_line.main(["reproduce", "--runs-dir", str(tmp_path), *arguments])


@pytest.fixture
def trained(monkeypatch, command):
    """The names of the runs that are trained."""
    names, train = [], compare.train

    def spy(config, data, **options):
        names.append(f"{Path(config.runs_dir).name}/{config.run}")
        return train(config, data, **options)

    monkeypatch.setattr(compare, "train", spy)
    return names


def entries(folder: Path) -> dict[str, dict]:
    return {e["name"]: e for e in json.loads((folder / "results.json").read_text())["experiments"]}


def test_kept_runs_of_other_threads_are_told(command, tmp_path, monkeypatch):
    """A comparison resumed with another number of threads is reported."""
    threads = iter([1, 1, 2, 2])
    train = compare.train

    def elsewhere(config, data, **options):
        train(config, data, **options)
        path = Path(config.runs_dir) / config.run / runs.METRICS
        record = json.loads(path.read_text()) | {"machines": [HERE | {"threads": next(threads)}]}
        path.write_text(json.dumps(record) + "\n")

    monkeypatch.setattr(compare, "train", elsewhere)
    speed = dataclasses.replace(LIST[0], claims=(Claim("faster", "target", Faster("b", "a"), 1.0),))
    monkeypatch.setattr(reproduce, "EXPERIMENTS", (speed,))
    assert command() == 0
    (claim,) = entries(tmp_path / "reproduce")["one"]["claims"]
    assert (claim["value"], claim["verdict"]) == (1.0, CANNOT_TELL)
    text = (tmp_path / "reproduce" / "report.md").read_text()
    note = "Examples per second do not compare: runs are of several machines or numbers of threads: c, 1 thread; c, 2"
    assert note in text
    assert note in (tmp_path / "reproduce" / "one" / "compare.md").read_text()


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_the_list_can_be_run(experiment):
    for quick in (False, True):
        plan = experiment.plan(TrainConfig(runs_dir="x"), quick=quick, path="p")
        assert plan.folder == Path("x") / experiment.name
        assert 2 <= len(plan.seeds) <= experiment.seeds
        for claim in experiment.claims:
            assert set(claim.measure.names) <= set(plan.configs)
            assert re.fullmatch(r"target|arXiv:\d{4}\.\d{5}", claim.source)
        # Scores are compared between all of them: they must be of the same rows.
        assert len({tuple(getattr(c, option) for option in DATA_OPTIONS) for c in plan.configs.values()}) == 1
    assert 0 < experiment.quick_minutes < experiment.minutes
    assert len({experiment.name for experiment in EXPERIMENTS}) == len(EXPERIMENTS)


def planned(command: str) -> tuple:
    """Configurations that a shell command trains, without the folders of its data and runs."""
    parser = command_line._parser()
    options = vars(parser.parse_args(shlex.split(command)[3:]))
    for option in ("command", "run_command"):
        del options[option]
    plan = command_line._plan(parser, options)
    where = {"runs_dir": "x", "threads": None, "path": None}
    return {name: dataclasses.replace(config, **where) for name, config in plan.configs.items()}, plan.seeds


def test_the_list_is_what_the_results_are_of():
    pages = "\n".join((ROOT / "docs" / page).read_text() for page in ("quality.md", "results.md"))
    lines = re.findall(r"^ {4}(python -m bench.studies compare .*)", pages, re.MULTILINE)
    published = [planned(line) for line in lines]
    for experiment in EXPERIMENTS:
        plan = experiment.plan(TrainConfig(runs_dir="x"))
        assert (plan.configs, plan.seeds) in published, experiment.name
        for quick in (False, True):
            plan = experiment.plan(TrainConfig(runs_dir="x"), quick=quick)
            assert planned(experiment.command(quick=quick)) == (plan.configs, plan.seeds)


def test_every_experiment_is_run_and_judged(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", SAVEFIG)
    monkeypatch.setattr(compare, "train", TRAIN)
    assert command("--quick") == 0
    folder = tmp_path / "reproduce-quick"
    found = entries(folder)
    assert [e["status"] for e in found.values()] == ["done", "done", "left out"]
    (claim,) = found["one"]["claims"]
    runs = {c["name"]: [run["auc"] for run in c["runs"]] for c in found["one"]["result"]["configurations"]}
    assert claim["value"] == pytest.approx(sum(b - a for a, b in zip(runs["a"], runs["b"], strict=True)) / 2)
    assert (claim["pairs"], claim["measure"]) == (2, "AUC, b - a")
    # A configuration with failing runs has no answer; the rest of its experiment is on the page.
    assert found["two"]["claims"][0]["verdict"] == CANNOT_TELL
    text = (folder / "report.md").read_text()
    assert "Left out of the numbers: b-seed0: loss is nan" in text
    assert "Left out: give --movielens PATH, the folder of a MovieLens data set." in text
    assert f"{claim['verdict'].capitalize()}: one is no worse [arXiv:1]. AUC, b - a: {claim['value']:+.4f}" in text
    out, err = capsys.readouterr()
    assert f"written to {folder / 'report.html'}" in out
    assert "[1/3] one: what it shows" in err
    page = (folder / "report.html").read_text()
    assert "one is no worse" in page
    assert page.count("data:image/png;base64,") == text.count("](") == len(list(folder.rglob("*.png")))


def test_finished_runs_are_kept_and_other_experiments_stay_on_the_page(command, tmp_path, trained):
    assert command("--only", "two") == 0
    assert command("--only", "one") == 0
    assert trained[6:] == [f"one/{name}-seed{seed}" for seed in (0, 1) for name in "ab"]
    first = entries(tmp_path / "reproduce")
    assert [e["status"] for e in first.values()] == ["done", "done", "not run"]
    assert len(trained) == 10
    assert command() == 0
    assert len(trained) == 10
    again = entries(tmp_path / "reproduce")
    assert again["one"]["result"] == first["one"]["result"]
    assert again["one"]["seconds"] > first["one"]["seconds"] > 0
    assert again["two"]["claims"] == first["two"]["claims"]


@pytest.mark.parametrize("again", [[], ["--movielens", "RATINGS/../RATINGS"]], ids=["not given", "spelled otherwise"])
def test_ratings_that_were_trained_on_stay_on_the_page(command, tmp_path, monkeypatch, trained, again):
    """Ratings stay on the page, whether or not a later call names their folder, in any form."""
    monkeypatch.setattr(compare, "open_data", lambda config: None)
    monkeypatch.chdir(tmp_path)
    assert command("--movielens", "RATINGS") == 0
    first, count = entries(tmp_path / "reproduce"), len(trained)
    assert first["ratings"]["status"] == "done"
    for more in (again, ["--only", "one"]):
        assert command(*more) == 0
        found = entries(tmp_path / "reproduce")["ratings"]
        assert (found["status"], found["result"]["seeds"]) == ("done", first["ratings"]["result"]["seeds"])
    assert len(trained) == count
    assert command("--movielens", "others") == 1
    assert "path is 'others', was 'RATINGS'" in entries(tmp_path / "reproduce")["ratings"]["why"]


def test_what_is_of_another_list_is_not_shown(command, tmp_path, monkeypatch):
    assert command("--only", "one") == 0
    other = (dataclasses.replace(LIST[0], seeds=3), *LIST[1:])
    monkeypatch.setattr(reproduce, "EXPERIMENTS", other)
    assert command("--only", "two") == 0
    found = entries(tmp_path / "reproduce")
    assert (found["one"]["status"], found["one"]["result"]) == ("not run", None)
    (tmp_path / "reproduce" / "results.json").write_text("[")
    assert command("--only", "one") == 0
    assert len(entries(tmp_path / "reproduce")["one"]["result"]["seeds"]) == 3


def places(value, path=()):
    """Every path in nested lists and dicts."""
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(part, (dict, list)):
            yield from places(part, (*path, key))


def test_results_that_no_comparison_wrote_are_not_shown(command, tmp_path, monkeypatch):
    """The page is written without results from a ``compare.json`` that lacks or changes anything."""
    assert command("--only", "one") == 0
    monkeypatch.setattr(reproduce.reproduce_report.pictures, "save", lambda *_, **how: None)
    request = reproduce.Request(TrainConfig(runs_dir=str(tmp_path)), only=("one",))
    path = request.folder / "one" / "compare.json"
    whole, shown = json.loads(path.read_text()), []
    for at in places(whole):
        for forge in (lambda holder, key: holder.pop(key), lambda holder, key: operator.setitem(holder, key, "x")):
            forged = copy.deepcopy(whole)
            forge(functools.reduce(operator.getitem, at[:-1], forged), at[-1])
            path.write_text(json.dumps(forged))
            results = reproduce.gather(request, {})
            if results["experiments"][0]["result"] is not None and at[-1] not in shown:
                shown.append(at[-1])
                reproduce.reproduce_report.write(request.folder, results)
    assert "std" in shown  # not shown on any page
    assert not {"runs", "outcome", "examples_per_second", "table_bytes", "reference"}.intersection(shown)


def test_an_experiment_that_fails_is_told_and_the_others_go_on(command, tmp_path, trained, capsys):
    (tmp_path / "reproduce" / "one" / "b-seed1").mkdir(parents=True)  # not a run
    assert command() == 1
    found = entries(tmp_path / "reproduce")
    assert [e["status"] for e in found.values()] == ["failed", "done", "left out"]
    assert "config.json is not the config of a run" in found["one"]["why"]
    assert "error: one: DataError: " in capsys.readouterr().err
    assert "Failed: DataError: " in (tmp_path / "reproduce" / "report.md").read_text()
    assert all(name.startswith("two/") for name in trained)
    (tmp_path / "reproduce" / "one" / "b-seed1").rmdir()
    assert command("--only", "one") == 0
    assert entries(tmp_path / "reproduce")["one"]["status"] == "done"


@pytest.mark.parametrize("stop", [RunInterruptedError("interrupted after step 3 of 4", Path("x")), KeyboardInterrupt()])
def test_an_interruption_leaves_a_page_and_goes_on(command, tmp_path, monkeypatch, capsys, stop):
    train = compare.train

    def interrupted(config, data, **options):
        if (Path(config.runs_dir).name, config.run) == ("two", "a-seed1"):
            raise stop
        return train(config, data, **options)

    monkeypatch.setattr(compare, "train", interrupted)
    assert command() == 130
    assert (
        f"repeat the command to resume; results so far: {tmp_path / 'reproduce' / 'report.md'}"
        in capsys.readouterr().err
    )
    found = entries(tmp_path / "reproduce")
    assert [e["status"] for e in found.values()] == ["done", "not finished", "not run"]
    assert "Not finished: interrupted." in (tmp_path / "reproduce" / "report.md").read_text()
    names = []
    monkeypatch.setattr(compare, "train", lambda c, d, **options: names.append(c.run) or train(c, d, **options))
    assert command() == 0
    assert names == ["a-seed1", "b-seed1", "c-seed1"]


def test_another_process_is_not_disturbed(command, tmp_path, capsys):
    with compare._locked(tmp_path / "reproduce" / "one"):
        assert command("--only", "one") == 1
    assert RunExistsError.__name__ in capsys.readouterr().err


def test_list_prints_names_and_costs_and_trains_nothing(command, tmp_path, capsys):
    assert command("--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["one           what it shows", "              1 claim; 90 min, with --quick 1 min"]
    assert lines[5].endswith("1 claim; 90 min, with --quick 1 min; needs --movielens PATH")
    assert lines[6] == "all           4.5 h, with --quick 3 min, of one core"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "one,three"], "only has 'three', allowed are one, two, ratings, each of them once"),
        (["--only", "one,one"], "only has 'one', allowed are one, two, ratings, each of them once"),
        (["--only", ""], "only has ''"),
        (["--threads", "0"], "threads is 0, allowed is 1 to 1024"),
        (["--lr", "1"], "unrecognized arguments: --lr 1"),
    ],
)
def test_wrong_requests_give_readable_errors(command, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit:
        command(*arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_ratings_are_read_where_the_user_says(monkeypatch):
    movielens = next(e for e in EXPERIMENTS if e.needs_path)
    request = reproduce.Request(TrainConfig(threads=2, runs_dir="x", data_dir="y"), movielens="z")
    for experiment in EXPERIMENTS:
        (config, *_) = request.plan(experiment).configs.values()
        assert (config.threads, config.data_dir, config.runs_dir) == (2, "y", str(Path("x/reproduce")))
        assert config.path == ("z" if experiment is movielens else None)
    quick = dataclasses.replace(request, quick=True)
    weeks = {c.weeks for e in EXPERIMENTS for c in quick.plan(e).configs.values() if c.data == "completejourney"}
    assert weeks == {experiments.QUICK_WEEKS}


def test_pictures_show_every_number_and_bound():
    measured = {"says": "s", "unit": "AUC", "at_least": -0.1, "value": 0.2, "low": 0.1, "high": 0.3, "verdict": MET}
    times = measured | {"unit": "times", "at_least": 3.0, "value": 2.0, "low": None, "high": None, "verdict": NOT_MET}
    missing = measured | {"value": None, "low": None, "high": None, "verdict": CANNOT_TELL}
    figure = reproduce_pictures.claims([{"name": "e", "claims": [measured, missing]}, {"name": "f", "claims": [times]}])
    aucs, ratios = figure.axes
    assert [label.get_text() for label in aucs.get_yticklabels()] == ["e: s"]
    (bar,) = aucs.containers[0].lines[2][0].get_segments()
    assert bar[:, 0].tolist() == pytest.approx([0.1, 0.3])
    assert ratios.containers[0].lines[0].get_xdata()[0] == 2.0
    assert ratios.lines[1].get_xdata()[0] == 3.0
    assert reproduce_pictures.claims([{"name": "e", "claims": [missing]}]) is None
    open_ = measured | {"verdict": CANNOT_TELL, "at_least": 0.15, "pairs": 8, "why": "w"}
    (axes,) = reproduce_pictures.claims([{"name": "e", "claims": [measured, open_]}]).axes
    assert [text.get_text() for text in axes.texts] == ["", "0.0500 from the bound, ±0.1000: 25 seeds would tell"]
    assert reproduce_pictures.quality_over_bytes([{"name": "e", "result": None}]) is None


def test_bytes_are_shares_of_the_reference():
    result = published("dimensions_quality")
    figure = reproduce_pictures.quality_over_bytes([{"name": "dimensions", "result": result}])
    (axes,) = figure.axes
    (container,) = axes.containers
    half = next(c for c in result["configurations"] if c["name"] == "dim8")
    shares = container.lines[0].get_xdata()
    assert len(shares) == len(result["configurations"]) - 1
    assert half["table_bytes"] / result["configurations"][0]["table_bytes"] in shares
    # Pareto-optimal sizes in bytes, by hand from the table in docs/quality.md.
    assert [text.get_text() for text in axes.texts] == ["qr15-int8", "qr4-int8", "mixed8", "mixed2"]
    speed = reproduce_pictures.speed(result)
    assert len(speed.axes[0].patches) == len(result["configurations"])


def test_the_frontier_is_what_nothing_smaller_reaches():
    points = [("a", 0.5, -0.1, 0), ("b", 0.1, -0.3, 0), ("c", 0.3, -0.4, 0), ("d", 0.1, -0.5, 0), ("e", 1.0, -0.1, 0)]
    assert [name for name, *_ in reproduce_pictures._frontier(points)] == ["b", "a"]


def test_text_is_escaped_in_html_and_tables(tmp_path):
    sections = [("a < b", ["x & y", reproduce_report.Table([("h",), ("1 | <2>",)]), reproduce_report.Code("<c>")])]
    html = reproduce_report.html(tmp_path, "<t>", sections)
    for text in ("a &lt; b", "x &amp; y", "1 | &lt;2&gt;", "&lt;c&gt;", "<h1>&lt;t&gt;</h1>"):
        assert text in html
    text = reproduce_report.markdown(tmp_path, "t", sections)
    assert "1 \\| <2>" in text
    assert "\n    <c>\n" in text
