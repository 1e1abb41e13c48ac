"""The functions of the package: what they return, what they refuse, and that the command line says the same."""

from __future__ import annotations

import copy
import doctest
import html
import inspect
import io
import json
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import axonn_tune
from axonn_tune.cli.main import cli
from axonn_tune.errors import NothingFeasibleError, UnknownNameError, UsageError
from axonn_tune.frameworks import registry
from axonn_tune.ranking.compare import causes
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.report.facts import axis_rows
from axonn_tune.request import SEARCHING, options_of
from tests.cli.running import run

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "axonn_tune"
MODULES = [f"axonn_tune.api.{path.stem}" for path in sorted((PACKAGE / "api").glob("*.py")) if path.stem != "__init__"]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
pytestmark = pytest.mark.usefixtures("shared_searches")
SMALL: dict[str, Any] = {"gpus": 8, "machine": "localhost", "precision": "fp32"}


@cache
def compared() -> axonn_tune.CompareResult:
    """A comparison that several tests look at."""
    return axonn_tune.compare("5b", gpus=16, batch=64)


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


@pytest.mark.parametrize(
    ("page", "fewest"), [pytest.param("python.md", 20, marks=pytest.mark.nightly), ("frameworks.md", 8)]
)
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
    """Guards the lazy imports: every name leads somewhere, is listed, and is what type checkers see; none is early."""
    assert set(axonn_tune._MODULES) | {"__version__"} == set(axonn_tune.__all__) <= set(dir(axonn_tune))
    for name in axonn_tune.__all__:
        assert getattr(axonn_tune, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'serach'"):
        _ = axonn_tune.serach  # type: ignore[attr-defined]
    source = (PACKAGE / "__init__.py").read_text("utf-8")
    seen = re.findall(r"^    from axonn_tune\.([\w.]+) import (?:\(([^)]*)\)|(.*))$", source, flags=re.MULTILINE)
    listed = {name.strip(): module for module, many, few in seen for name in (many or few).split(",") if name.strip()}
    assert listed == axonn_tune._MODULES
    probe = (
        "import sys, axonn_tune;"
        "print([name for name in sys.modules if name.startswith('axonn_tune.')], 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['axonn_tune.vocabulary'] False"


def without_time(document: Any) -> Any:
    """A ranking without how long the search took."""
    document["searched"].pop("seconds")
    document.pop("remarks", None)
    return document


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (
            lambda: axonn_tune.search("5b", gpus=64, cost=["alpha-beta", "paper"], x=2, seq=1024),
            "search --gpus 64 --model 5b --cost alpha-beta --cost paper --x 2 --seq 1024",
        ),
        (compared, "compare --gpus 16 --model 5b --batch 64"),
        (lambda: axonn_tune.explain("5b", gpus=64, pick=2), "explain --gpus 64 --model 5b --pick 2"),
        (
            lambda: axonn_tune.sweep(["5b", "10b"], gpus=[64, 128], batch=256),
            "sweep --gpus 64,128 --batch 256 --model 5b,10b",
        ),
        (axonn_tune.machines, "machines list"),
    ],
)
def test_json_is_that_of_the_command_line(call: Any, line: str) -> None:
    """Guards the contract: one code path, one document."""
    found, printed = json.loads(call().to_json()), run(f"{line} --format json").document
    if line.startswith("search"):
        found, printed = without_time(found), without_time(printed)
    assert found == printed


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
    assert len(found.rejected) == found.searched.grids - len(found) - found.searched.unlisted


def test_documents_may_be_names_paths_or_objects(tmp_path: Path) -> None:
    """Guards that all three say the same, overrides included, by name of the document or without."""
    from axonn_tune.specs.document import to_yaml

    loaded = axonn_tune.load_model("nano")
    path = tmp_path / "copy.yaml"
    path.write_text(to_yaml(loaded.document), encoding="utf-8")
    found = {
        load_inputs(axonn_tune.Request(model, set={key: np.int64(4)}, **SMALL)).problem.model.layers
        for model in ("nano", path, str(path), loaded, loaded.document)
        for key in ("layers", "model.layers")
    }
    assert found == {4}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gpus": 0}, "gpus=0: must be a whole number from 1"),
        ({"gpus": 2.5}, "gpus=2.5"),
        ({"gpus": True}, "gpus=True: must be a whole number"),
        ({"x": -1}, "x=-1"),
        ({"kept_layers": -1}, "must be a whole number from 0"),
        ({"precision": "bf61"}, "did you mean 'bf16'"),
        ({"rank_by": "steps"}, "known: communication, exposed, step, iteration"),
        ({"cost": "papr"}, "did you mean 'paper'"),
        ({"overlap": ["outputs"]}, "did you mean 'output'"),
        ({"no_overlap": "al"}, "did you mean 'all'"),
        ({"set": "layers=4"}, "give a mapping"),
        ({"set": {"layer": 4}}, "did you mean 'layers'"),
        ({"tokens_total": "1.5X"}, "such as 300B, 1.5T"),
        ({"order": "x,k"}, "rank order 'x,k' must name axes once each, as in x,y,z,data"),
        ({"order": [1]}, "order=[1]: give names, as 'a,b'"),
        ({"lora_targets": 5}, "lora_targets=5: give names, as 'a,b'"),
        ({"framework": "nemo", "order": "TP,TP"}, "as in TP,CP,DP,PP"),
    ],
)
def test_wrong_values_are_named(given: dict[str, Any], words: str) -> None:
    """Guards that nothing wrong is taken silently: errors are those of the command line's tree."""
    with pytest.raises(UsageError, match=re.escape(words)):
        axonn_tune.search("nano", **{**SMALL, **given})


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("no_overlap", True, ("all",)),
        ("no_overlap", "all", ("all",)),
        ("no_overlap", False, ()),
        ("overlap", "output", ("output",)),
        ("pipeline", True, True),
        ("pipeline", False, None),
        ("pipeline", 1, 1),
        ("x", np.int64(2), 2),
        ("tokens_total", "1.5T", 1_500_000_000_000),
        ("order", "z, data", ("z", "data")),
        ("set", {"a": "1", "b": np.float64(2.5), "c": None}, ("a=1", "b=2.5", "c=")),
        ("cost", None, ("alpha-beta",)),
    ],
)
def test_values_are_taken_in_their_forms(name: str, given: Any, taken: Any) -> None:
    """Guards switches, single values for several, NumPy's numbers, and texts of numbers."""
    request = axonn_tune.Request(**{name: given})
    assert getattr(request, name) == taken
    assert getattr(request.without_pins(), name) == (None if name in request.pins else taken)


def test_frameworks_names_lead_to_sizes() -> None:
    """Guards `best.tp` beside `best.x`, frames and keywords by such names, GPUs by place, keys of compare."""
    theirs: dict[str, Any] = {"machine": "dgx-h100", "framework": "megatron-core"}
    found = axonn_tune.search("llama3-8b", 16, **theirs)
    best: Any = found.best
    assert (best.tp, best.PP, best.vpp, best.cp) == (best.x, best.pipeline, best.chunks, best.grid.context)
    assert best.layout == copy.copy(best).layout
    picked = axonn_tune.search("llama3-8b", 16, **theirs, top=40).frame.query("TP == 2")
    assert len(picked)
    assert set(picked["x"]) == {2}
    assert "CP" in found.rejected.columns
    with pytest.raises(AttributeError, match="no attribute 'dp_shard'"):
        _ = best.dp_shard
    pinned = axonn_tune.search("llama3-8b", 16, **theirs, tp=8, pp=2, global_batch_size=128).best
    assert (pinned.x, pinned.pipeline) == (8, 2)
    with pytest.raises(UsageError, match=r"--dp-shard is torchtitan's name of what Megatron-Core calls GTP"):
        axonn_tune.search("llama3-8b", 16, **theirs, dp_shard=8)
    for wrong, near in (("tpp", "tp"), ("micro_batches", "micro_batch")):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{wrong}', did you mean '{near}'"):
            axonn_tune.search("llama3-8b", 16, **theirs, **{wrong: 2})
    found = compared()
    assert found["megatron-core"] is found["megatron-lm"]
    assert found["axonn-tune"] is found["4d"]


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
        lambda: axonn_tune.search("5b", gpus=8),
        compared,
        lambda: axonn_tune.sweep("5b", gpus=[8, 16]),
        axonn_tune.machines,
    ],
    ids=["search", "compare", "sweep", "machines"],
)
def test_results_show_themselves(result: Any, tmp_path: Path) -> None:
    """Guards notebooks, consoles and reports: closed HTML, text with the same cells, a short repr, a narrow console on
    which nothing is cut or taken for markup, and the page of the command line, which names the call."""
    from xml.etree import ElementTree

    from rich.console import Console

    found = result()
    page = ElementTree.fromstring(f"<div>{found._repr_html_()}</div>")
    cells = ["".join(cell.itertext()) for cell in page.findall("table/tbody/tr/td")]
    assert cells
    assert all(cell in str(found) for cell in cells)
    assert repr(found).startswith("<")
    assert len(repr(found)) < 400
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(found)
    printed, shown = console.export_text(), html.unescape(re.sub(r"<.*?>", "", found._repr_html_()))
    assert Counter(filter(str.isalnum, shown)) <= Counter(filter(str.isalnum, printed))
    if hasattr(found, "write_report"):
        pytest.importorskip("plotly")
        text = found.write_report(tmp_path / "report.html").read_text("utf-8")
        assert found.call.startswith("axonn_tune.")
        assert re.search(r"model=(\\u0027|'|&#x27;)5b", text)


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


@pytest.mark.nightly
def test_a_sweep_over_ep_has_the_best_layout_of_each_size() -> None:
    """Guards `--over`: each divisor of the experts, with the step that a search with it pinned has, and dispatch."""
    asked = {"gpus": 16, "batch": 32, "machine": "dgx-h100", "framework": "megatron-core", "recompute": "full"}
    found = axonn_tune.sweep("mixtral-8x7b", over="ep", **asked)
    assert [point.over for point in found] == [("EP", 1), ("EP", 2), ("EP", 4), ("EP", 8)]
    last = found[-1]
    assert last.entry is not None
    assert last.entry.iteration_s == axonn_tune.search("mixtral-8x7b", ep=8, **asked)[0].iteration_s
    terms = axonn_tune.explain("mixtral-8x7b", ep=8, **asked).priced.terms
    sent = [term.seconds for term in terms if term.op in ("dispatch", "combine")]
    assert sent
    assert last.dispatch_s == pytest.approx(sum(sent))
    best_s = min(point.entry.iteration_s for point in found if point.entry)
    assert last.efficiency == pytest.approx(best_s / last.entry.iteration_s)
    assert found.to_dict()["over"] == "EP"
    assert found.render("csv").splitlines()[0].endswith(",over,dispatch_s")
    for over, words in (("zz", "it has tp, gtp"), ("tp", "write its sizes"), ("ep=0", "no positive number")):
        with pytest.raises(UsageError, match=words):
            axonn_tune.sweep("mixtral-8x7b", over=over, **asked)
    with pytest.raises(UsageError, match="--ep pins it"):
        axonn_tune.sweep("mixtral-8x7b", over="ep", ep=2, **asked)


def test_an_explanation_maps_ranks_of_experts() -> None:
    """Guards the layout of a run with experts: their axes over the same ranks as all others, by hand."""
    asked = {"gpus": 64, "machine": "dgx-h100", "framework": "megatron-core", "tp": 2, "pp": 1, "ep": 16, "etp": 1}
    priced = axonn_tune.explain("qwen3-30b-a3b", micro_batch=1, **asked).priced
    rows = {row["axis"]: (row["size"], row["ranks"], row["network"]) for row in axis_rows(priced)}
    assert rows["EP"] == (16, "0–15", "network")
    assert rows["EDP"] == (4, "0, 16, 32, 48", "network")
    assert rows["TP"] == (2, "0, 1", "nvlink")
    sent = sum(term.exposed_s for term in priced.terms if term.op in ("dispatch", "combine"))
    found = causes(priced)
    assert found["exposed EP"] >= sent > 0.0
    assert sum(found.values()) == pytest.approx(priced.iteration_s)


def test_results_print_in_a_line() -> None:
    """Guards `print(found.best)`: layout, step and memory, not 10 kB of documents; nothing that has one prints more."""
    asked: dict[str, Any] = {"machine": "dgx-h100", "framework": "megatron-core", "batch": 64}
    found = axonn_tune.search("llama3-8b", 8, **asked)
    said = f"{found.best}"
    assert re.fullmatch(
        r"<#1: [A-Z]+=.*, micro-batch \d, recompute \S+: .* s a step, MFU .*%, .* GiB of 73.1 GiB>", said
    )
    each = axonn_tune.compare("llama3-8b", gpus=8, **asked)
    swept = axonn_tune.sweep("llama3-8b", gpus=8, **asked)
    for one in (found.best, found.explain().priced, found.ranked, found.inputs, next(iter(each)), swept[0]):
        assert len(f"{one}") == len(repr(one)) < 600, type(one)
