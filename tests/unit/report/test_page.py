"""The file itself: whole, self-contained, not too large; and what it is made from."""

from __future__ import annotations

import json
import re
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

import axonn_tune
from axonn_tune.api.sources import read_section
from axonn_tune.errors import DocumentError, EnvironmentProblem, UsageError
from axonn_tune.report import page
from axonn_tune.report.output import json_text
from axonn_tune.report.ranking_section import DETAILED, MOST_ROWS, ranking_section
from tests.cli.running import good, run
from tests.unit.report.pages import ranking

FIXTURES = Path(__file__).parents[2] / "fixtures"
LARGEST_BYTES = 6_000_000


def data_of(text: str) -> dict[str, Any]:
    """The data a page holds."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    assert found
    loaded: dict[str, Any] = json.loads(found[1])
    return loaded


def test_a_full_page_is_small_enough_to_send() -> None:
    """Guards the size: the most rows there can be, plotly and all, below 6 MB."""
    document = deepcopy(ranking())
    feasible = [config for config in document["configs"] if config["feasible"]]
    document["configs"] = [{**feasible[rank % len(feasible)], "rank": rank + 1} for rank in range(MOST_ROWS)]
    for config in document["configs"]:
        config["iteration_s"] = config["iteration_s"] * (1 + config["rank"] / 77777)
    text = page.page_text([ranking_section(document, identity="s1", source="test")], command="axonn-tune")
    assert len(text.encode()) < LARGEST_BYTES


def test_the_page_asks_for_nothing() -> None:
    """Guards offline use: no address to load from, and a policy that forbids to."""
    text = page.page_text([ranking_section(ranking(), identity="s1", source="test")], command="axonn-tune")
    assert "default-src 'none'" in text
    own = re.sub(r'<script type="text/plain" id="plotly">.*?</script>', "", text, flags=re.DOTALL)
    own = re.sub(r'<script type="application/json".*?</script>', "", own, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", own)
    assert "fetch(" not in own
    assert "@import" not in own
    assert "%" + "DATA%" not in text


def test_headlines_have_the_axes_of_experts(tmp_path: Path) -> None:
    """Guards models with experts: headline, names of bars, table and commands say EP, ETP and the dispatcher; degrees
    of 1 are left out."""
    asked = "--gpus 16 --model mixtral-8x7b --machine dgx-h200 --framework megatron-core --tp 2 --gtp 1 --pp 1 --cp 1"
    done = good(f"{asked} --ep 4 --etp 2 --micro-batch 1 --format json --html {tmp_path}/r.html")
    (first,) = done.document["configs"]
    (shown,) = data_of((tmp_path / "r.html").read_text("utf-8"))["sections"]
    said = "TP 2 · EP 4 · ETP 2 · DP 8"
    assert shown["verdict"][0].startswith(
        f"#1: {said}, micro-batch 1, recompute {first['recompute']}, dispatcher alltoall"
    )
    (panel,) = (block for block in shown["blocks"] if block["kind"] == "configurations")
    assert panel["items"][0]["short"] == f"#1: {said}"
    assert "--ep {expert} --etp {expert_tensor}" in panel["commands"]["Explain it"]
    (table,) = (block for block in shown["blocks"] if block["kind"] == "table")
    assert {"EP", "ETP", "dispatcher"} <= {column["label"].replace("\u00ad", "") for column in table["columns"]}


def test_words_of_a_document_cannot_leave_their_element() -> None:
    """Guards against markup in names and sources: data stays data, in both places that show it."""
    document = deepcopy(ranking())
    document["model"]["description"] = "</script><script>alert(1)</script>"
    text = page.page_text([ranking_section(document, identity="s1", source="</script><b>")], command="<b>")
    assert "alert(1)</script>" not in text
    shown = json.dumps(data_of(text)).count("</script><script>alert(1)</script>")
    assert shown == 2 + DETAILED, "in the model, its table, and each launch config"


def test_without_plotly_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the extra: exit code 5 before anything is searched, and no file."""
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(EnvironmentProblem, match=r"pip install '\.\[report\]'"):
        page.page_text([], command="axonn-tune")
    done = run(f"--gpus 8 --model nano --html {tmp_path}/r.html")
    assert (done.code, done.out) == (5, "")
    assert "pip install '.[report]'" in done.err
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One file of each kind a report is made from."""
    folder = tmp_path_factory.mktemp("sources")
    lines = {
        "launch": "-o {}",
        "ranking": "--format json --top 0",
        "explain": "explain --format json",
        "sweep": "sweep --format json",
        "comparison": "compare --format json",
    }
    found = {kind: folder / f"{kind}.{'yaml' if kind == 'launch' else 'json'}" for kind in lines}
    for kind, line in lines.items():
        out = good(f"{line.format(found[kind])} --gpus 8 --model nano").out
        if kind != "launch":
            found[kind].write_text(out, "utf-8")
    return {**found, "measurement": FIXTURES / "v2/measurement.yaml", "run": FIXTURES / "diagnose/lab/healthy-z4"}


def test_each_kind_of_source_is_recognised(sources: dict[str, Path], tmp_path: Path) -> None:
    """Guards `axonn-tune report`: all kinds at once, a section each, in the order given."""
    report = tmp_path / "report.html"
    done = good(f"report {' '.join(map(str, sources.values()))} -o {report}")
    assert done.err == f"Wrote the report as {report}.\n"
    sections = data_of(report.read_text("utf-8"))["sections"]
    assert isinstance(sections, list)
    assert [section["id"] for section in sections] == [f"s{number}" for number in range(1, 8)]
    assert all(section["blocks"] for section in sections)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("model.yaml", "schema: axonn-tune/model/1\n", "is a model document; a report is made from: launch, ranking"),
        ("note.txt", "name: me\n", "is not a document with a schema"),
        ("list.json", "[1, 2]", "is not a document with a schema"),
        ("rank.json", '{"schema": "axonn-tune/rankings/1"}', "did you mean 'ranking'?"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    """Guards against reports of what is none: the kind is named, and what would do."""
    path = tmp_path / name
    path.write_text(text, "utf-8")
    with pytest.raises(UsageError) as error:
        read_section(str(path), number=1)
    assert message in str(error.value)


def test_broken_json_names_what_is_wrong(tmp_path: Path) -> None:
    """Guards documents of other versions and edited ones: an error with the place, not a traceback."""
    document = deepcopy(ranking())
    document["machine"]["accelerator"]["memory_gib"] = "much"
    path = tmp_path / "ranking.json"
    path.write_text(json_text(document), "utf-8")
    done = run(f"report {path} -o {tmp_path}/r.html")
    assert done.code == 2
    assert "accelerator.memory_gib: must be a number" in done.err
    del document["configs"]
    document["machine"]["accelerator"]["memory_gib"] = 40.0
    path.write_text(json_text(document), "utf-8")
    done = run(f"report {path} -o {tmp_path}/r.html")
    assert done.code == 2
    assert "'configs'" in done.err


@pytest.mark.parametrize(
    ("kind", "within", "key"),
    [
        ("ranking", ("configs", 0), "memory_bytes"),
        ("sweep", ("points", 0, "config"), "tokens_per_s"),
        ("comparison", ("contenders", 0), "prediction"),
    ],
)
def test_a_part_without_a_key_is_an_error_with_the_file(
    sources: dict[str, Path], tmp_path: Path, kind: str, within: tuple[str | int, ...], key: str
) -> None:
    """Guards results of other versions: what is missing below the top is named too, with the file."""
    document = json.loads(sources[kind].read_text("utf-8"))
    part = document
    for step in within:
        part = part[step]
    del part[key]
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(document), "utf-8")
    with pytest.raises(DocumentError) as error:
        read_section(str(path), number=1)
    assert str(error.value) == f"{path}: a part of it has no '{key}': made by another version, or edited"


def test_causes_on_a_page_have_the_digits_of_the_table() -> None:
    """Guards cells such as 0.0000489 and -0.0235829 s beside steps of 7 s."""
    section = axonn_tune.compare("llama3-8b", gpus=64, machine="dgx-h100", batch=256).section(source="test")
    table = next(one for one in section["blocks"] if one.get("title") == "Where the step goes")
    numbers = [one for one in table["columns"] if not one["text"]]
    assert {one["decimals"] for one in numbers} == {numbers[0]["decimals"]}
    for one in numbers:
        shown = [round(value, one["decimals"]) for value in one["values"] if value is not None]
        assert any(shown), one["label"]
