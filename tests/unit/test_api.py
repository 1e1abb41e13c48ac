"""The functions of the package: what they return, what they refuse, and that the command line says the same."""

from __future__ import annotations

import doctest
import html
import inspect
import io
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import axonn_tune
from axonn_tune.cli.main import cli
from axonn_tune.errors import NothingFeasibleError, UnknownNameError, UsageError
from axonn_tune.frameworks import registry
from axonn_tune.request import SEARCHING, options_of
from tests.cli.running import run

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "axonn_tune"
MODULES = [f"axonn_tune.api.{path.stem}" for path in sorted((PACKAGE / "api").glob("*.py")) if path.stem != "__init__"]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
SMALL: dict[str, Any] = {"gpus": 8, "machine": "localhost", "precision": "fp32"}


def test_docstrings_hold() -> None:
    """Guards every example in a docstring of the API."""
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(optionflags=FLAGS)
    found = [finder.find(getattr(axonn_tune, name), name) for name in axonn_tune.__all__ if name != "__version__"]
    tried = [runner.run(one) for several in [finder.find(axonn_tune), *found] for one in several]
    assert sum(one.attempted for one in tried) >= 14
    assert not any(one.failed for one in tried)


def pycon(page: Path) -> str:
    """All interactive examples of a page as one session; `…` stands for anything."""
    blocks = re.findall(r"^```pycon\n(.*?)^```", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return "\n".join(blocks).replace("…", "...")


@pytest.mark.parametrize(("page", "fewest"), [("python.md", 20), ("frameworks.md", 8)])
def test_the_examples_of_a_page_hold(page: str, fewest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards docs/python.md and docs/frameworks.md: their examples, each page from top to bottom in one session."""
    monkeypatch.chdir(tmp_path)
    known, text = dict(registry()), pycon(ROOT / "docs" / page)
    examples = doctest.DocTestParser().get_doctest(text, {"np": __import__("numpy")}, page, f"docs/{page}", 0)
    assert len(examples.examples) > fewest
    try:
        assert doctest.DocTestRunner(optionflags=FLAGS).run(examples).failed == 0
    finally:
        registry().clear()
        registry().update(known)


def test_the_page_on_python_has_every_name() -> None:
    """Guards the list of names: each one of the package, in a row of a table."""
    rows = "".join(line for line in (ROOT / "docs" / "python.md").read_text("utf-8").splitlines() if line[:1] == "|")
    missing = [name for name in axonn_tune.__all__ if f"`{name}`" not in rows and name != "__version__"]
    assert not missing


def test_names_are_there_and_bring_what_they_need() -> None:
    """Guards the lazy imports: every name leads somewhere, and is listed for completion."""
    assert set(axonn_tune._MODULES) | {"__version__"} == set(axonn_tune.__all__) <= set(dir(axonn_tune))
    for name in axonn_tune.__all__:
        assert getattr(axonn_tune, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'serach'"):
        _ = axonn_tune.serach  # type: ignore[attr-defined]


def test_type_checkers_see_the_same_names() -> None:
    """Guards completion: what is imported for type checkers is what is imported when used."""
    source = (PACKAGE / "__init__.py").read_text("utf-8")
    seen = re.findall(r"^    from axonn_tune\.([\w.]+) import (?:\(([^)]*)\)|(.*))$", source, flags=re.MULTILINE)
    listed = {name.strip(): module for module, many, few in seen for name in (many or few).split(",") if name.strip()}
    assert listed == axonn_tune._MODULES


def test_the_import_is_light() -> None:
    """Guards start-up: importing the package imports nothing but itself and what Python has."""
    probe = (
        "import sys, axonn_tune;"
        "print([name for name in sys.modules if name.startswith('axonn_tune.')], 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"


def without_time(document: Any) -> Any:
    """A ranking without how long the search took."""
    document["searched"].pop("seconds")
    document.pop("remarks", None)
    return document


def test_json_is_that_of_the_command_line() -> None:
    """Guards the contract: one code path, one document."""
    found = axonn_tune.search("5b", gpus=64, cost=["alpha-beta", "paper"], x=2, seq=1024)
    printed = run("search --gpus 64 --model 5b --cost alpha-beta --cost paper --x 2 --seq 1024 --format json").document
    assert without_time(json.loads(found.to_json())) == without_time(printed)
    assert without_time(found.to_dict(top=0))["configs"][: len(printed["configs"])] == printed["configs"]


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: axonn_tune.compare("5b", gpus=64), "compare --gpus 64 --model 5b"),
        (lambda: axonn_tune.explain("5b", gpus=64, pick=2), "explain --gpus 64 --model 5b --pick 2"),
        (
            lambda: axonn_tune.sweep(["5b", "10b"], gpus=[64, 128], batch=256),
            "sweep --gpus 64,128 --batch 256 --model 5b,10b",
        ),
        (axonn_tune.machines, "machines list"),
    ],
)
def test_other_json_is_that_of_the_command_line(call: Any, line: str) -> None:
    """Guards the same of the other results."""
    assert json.loads(json.dumps(call().to_dict())) == run(f"{line} --format json").document


def test_a_ranking_is_a_sequence() -> None:
    """Guards indexing: from 0, from the end, slices, iteration; terms are there."""
    found = axonn_tune.search("nano", **SMALL)
    assert found[0] == found.best == next(iter(found))
    assert found[-1].rank == len(found)
    assert [entry.rank for entry in found[:3]] == [1, 2, 3]
    assert found[0].terms or found[0].communication_s == 0
    with pytest.raises(IndexError):
        _ = found[len(found)]


def test_frames_hold_what_csv_holds() -> None:
    """Guards columns and their units: those of --format csv, numbers as numbers."""
    found = axonn_tune.search("5b", gpus=64, cost=["alpha-beta", "paper"])
    header = run("search --gpus 64 --model 5b --cost alpha-beta --cost paper --format csv").out.splitlines()[0]
    assert ",".join(found.frame.columns) == header
    assert found.frame["iteration_s"].dtype.kind == "f"
    assert len(found.frame) == len(found)
    assert set(found.rejected.columns) == {"x", "y", "z", "data", "rejected_because"}
    assert len(found.rejected) == found.searched.grids - len(found)


def test_documents_may_be_names_paths_or_objects(tmp_path: Path) -> None:
    """Guards that all three say the same, overrides included."""
    from axonn_tune.specs.document import to_yaml

    loaded = axonn_tune.load_model("nano")
    path = tmp_path / "copy.yaml"
    path.write_text(to_yaml(loaded.document), encoding="utf-8")
    wanted = axonn_tune.search("nano", set={"layers": 4}, **SMALL).best
    for model in (path, str(path), loaded, loaded.document):
        assert axonn_tune.search(model, set={"model.layers": 4}, **SMALL).best == wanted


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gpus": 0}, "gpus=0: must be a whole number from 1"),
        ({"gpus": 2.5}, "gpus=2.5"),
        ({"precision": "bf61"}, "did you mean 'bf16'"),
        ({"rank_by": "steps"}, "known: communication, exposed, step, iteration"),
        ({"cost": "papr"}, "did you mean 'paper'"),
        ({"overlap": ["outputs"]}, "did you mean 'output'"),
        ({"set": "layers=4"}, "give a mapping"),
        ({"set": {"layer": 4}}, "did you mean 'layers'"),
        ({"x": -1}, "x=-1"),
    ],
)
def test_wrong_values_are_named(given: dict[str, Any], words: str) -> None:
    """Guards that nothing wrong is taken silently: errors are those of the command line's tree."""
    with pytest.raises(UsageError, match=re.escape(words)):
        axonn_tune.search("nano", **{**SMALL, **given})


def test_an_unknown_option_is_refused() -> None:
    """Guards against options that go nowhere, as Python does."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'micro_batches', did you mean 'micro_batch'"):
        axonn_tune.search("nano", micro_batches=2, **SMALL)  # type: ignore[call-arg]


def test_nothing_feasible_is_a_result() -> None:
    """Guards that a search without a result says why, and shows itself all the same."""
    found = axonn_tune.search("80b", gpus=8)
    assert len(found) == 0
    assert not found
    assert len(found.frame) == 0
    assert len(found.rejected)
    assert "binding constraint: memory" in str(found)
    assert "binding constraint" in found._repr_html_()
    for asks in (lambda: found.best, found.explain, found.launch_config):
        with pytest.raises(NothingFeasibleError, match="nearest change"):
            asks()
    with pytest.raises(UnknownNameError):
        axonn_tune.search("80c", gpus=8)


def test_launch_configs_name_the_call(tmp_path: Path) -> None:
    """Guards provenance: what was called, without what was left at its default; a script beside it."""
    found = axonn_tune.search("20b", gpus=64, x=2)
    written = found.write_launch_config(tmp_path / "launch.yaml", pick=2, emit="slurm")
    assert [path.name for path in written] == ["launch.yaml", "launch.sbatch"]
    text = written[0].read_text("utf-8")
    assert "axonn_tune.search(model='20b', gpus=64" in text
    assert "x=2" in text
    assert "batch" not in found.call
    assert axonn_tune.explain_launch(written[0]).entry.x == 2
    with pytest.raises(UsageError, match="only"):
        found.write_launch_config(tmp_path / "none.yaml", pick=10_000)
    assert not (tmp_path / "none.yaml").exists()


@pytest.mark.parametrize(
    "result",
    [
        lambda: axonn_tune.search("5b", gpus=64),
        lambda: axonn_tune.compare("5b", gpus=64),
        lambda: axonn_tune.sweep("5b", gpus=[64, 128]),
        lambda: axonn_tune.machines(),
    ],
    ids=["search", "compare", "sweep", "machines"],
)
def test_results_show_themselves(result: Any) -> None:
    """Guards notebooks and consoles: HTML that is closed, text with the same cells, a short repr."""
    from xml.etree import ElementTree

    found = result()
    page = ElementTree.fromstring(f"<div>{found._repr_html_()}</div>")
    assert len(page.findall("table/tbody/tr")) >= 2
    assert len(repr(found)) < 400
    assert repr(found).startswith("<")
    cells = ["".join(cell.itertext()) for cell in page.findall("table/tbody/tr/td")]
    assert all(cell in str(found) for cell in cells)


def test_rich_prints_results_as_tables() -> None:
    """Guards `rich.print`: nothing is cut on a narrow console, or taken for markup."""
    from rich.console import Console

    console = Console(width=60, record=True, file=io.StringIO())
    for found in (axonn_tune.search("5b", gpus=64), axonn_tune.compare("5b", gpus=64), axonn_tune.sweep("5b", gpus=8)):
        console.print(found)
        printed, shown = console.export_text(), html.unescape(re.sub(r"<.*?>", "", found._repr_html_()))
        assert Counter(filter(str.isalnum, shown)) <= Counter(filter(str.isalnum, printed))


def test_results_write_reports(tmp_path: Path) -> None:
    """Guards `write_report`: the page of the command line, naming the call."""
    pytest.importorskip("plotly")
    for found in (axonn_tune.search("5b", gpus=8), axonn_tune.compare("5b", gpus=8), axonn_tune.sweep("5b", gpus=[8])):
        page = found.write_report(tmp_path / "report.html").read_text("utf-8")
        assert found.call.startswith("axonn_tune.")
        assert "model=\\u00275b\\u0027" in page or "model='5b'" in page or "model=&#x27;5b&#x27;" in page


def test_explanations_show_themselves() -> None:
    """Guards the same of one configuration."""
    shown = axonn_tune.explain("nano", **SMALL)
    assert shown._repr_markdown_().startswith("# ")
    assert str(shown) in run("explain --gpus 8 --model nano --machine localhost --precision fp32").out
    assert "nano on 8" in repr(shown)


@pytest.mark.parametrize("command", SEARCHING)
def test_an_option_is_a_field(command: str) -> None:
    """Guards the one list: each field is an option, a keyword with its default, and said in help and docstring."""
    options = options_of(command)
    params = {param.name: param for param in cli.commands[command].params}
    assert options.keys() <= params.keys()
    # A sweep words its own lists; functions of runs and of baselines take requests in other ways.
    assert all(params[name].help == option.words for name, option in options.items() if name not in ("gpus", "batch"))
    if command in ("search", "explain", "compare", "sweep"):
        function = getattr(axonn_tune, command)
        parameters = inspect.signature(function).parameters
        assert next(iter(parameters)) == "model"
        assert parameters.keys() == options.keys()
        assert all(name in function.__doc__ for name in options)


def test_numpy_numbers_are_taken() -> None:
    """Guards loops over arrays and frames."""
    import numpy as np

    counts = np.array([8, 16])
    assert [len(axonn_tune.search("nano", machine="localhost", gpus=count)) > 0 for count in counts] == [True, True]
    assert len(axonn_tune.sweep("nano", machine="localhost", gpus=counts)) == 2  # type: ignore[arg-type]
    assert axonn_tune.search("nano", set={"layers": np.int64(4)}, **SMALL).inputs.model.document.layers == 4


def test_no_overlap_is_a_switch_too() -> None:
    """Guards `no_overlap=True`, the twin of the bare option: no overlap at all, as "all" says; False is none given."""
    steps = {
        given: axonn_tune.search("nano", no_overlap=given, **SMALL).best.iteration_s for given in (True, "all", False)
    }
    assert steps[True] == steps["all"] > steps[False] == axonn_tune.search("nano", **SMALL).best.iteration_s
