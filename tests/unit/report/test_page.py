"""The file itself: whole, self-contained, not too large; and what it is made from."""

from __future__ import annotations

import json
import re
import sys
from copy import deepcopy
from pathlib import Path

import pytest

from axonn_tune.errors import DocumentError, EnvironmentProblem, UsageError
from axonn_tune.report import page
from axonn_tune.report.output import json_text
from axonn_tune.report.ranking_section import DETAILED, MOST_ROWS, ranking_section
from axonn_tune.report.sources import read_section
from axonn_tune.report.validation import validation_document
from axonn_tune.specs.document import to_yaml
from axonn_tune.validation.comparison import RunComparison
from tests.cli.running import good, run
from tests.unit.report.pages import blocks, ranking, titled, values
from tests.unit.report.test_run import summary, term
from tests.unit.validation.made import measurements

LARGEST_BYTES = 6_000_000


def data_of(text: str) -> dict[str, object]:
    """The data a page holds."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    assert found
    loaded: dict[str, object] = json.loads(found[1])
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
    found = {
        "launch": folder / "launch.yaml",
        "ranking": folder / "ranking.json",
        "explain": folder / "explain.json",
        "sweep": folder / "sweep.json",
        "comparison": folder / "comparison.json",
        "validation": folder / "validation.json",
        "measurement": folder / "measurement.yaml",
        "summary": folder / "run",
    }
    good(f"--gpus 8 --model nano -o {found['launch']}")
    found["ranking"].write_text(good("--gpus 8 --model nano --format json --top 0").out, "utf-8")
    found["explain"].write_text(good("explain --gpus 8 --model nano --format json").out, "utf-8")
    found["sweep"].write_text(good("sweep --gpus 1,2,4 --model nano --format json").out, "utf-8")
    found["comparison"].write_text(good("compare --gpus 8 --model nano --format json").out, "utf-8")
    found["validation"].write_text(json_text(validation_document(RunComparison(measurements(runs=2)))), "utf-8")
    found["measurement"].write_text(to_yaml(measurements(runs=2)), "utf-8")
    found["summary"].mkdir()
    text = summary(term("block")).model_dump_json(by_alias=True)
    (found["summary"] / "summary.json").write_text(text, "utf-8")
    return found


def test_each_kind_of_source_is_recognised(sources: dict[str, Path], tmp_path: Path) -> None:
    """Guards `axonn-tune report`: all kinds at once, a section each, in the order given."""
    report = tmp_path / "report.html"
    done = good(f"report {' '.join(map(str, sources.values()))} -o {report}")
    assert done.err == f"Wrote the report as {report}.\n"
    sections = data_of(report.read_text("utf-8"))["sections"]
    assert isinstance(sections, list)
    assert [section["id"] for section in sections] == [f"s{number}" for number in range(1, 9)]
    assert all(section["blocks"] for section in sections)


def test_a_file_and_its_json_make_the_same_section(sources: dict[str, Path]) -> None:
    """Guards that there is one way: --html shows what a report of --format json shows."""
    from_file = read_section(str(sources["measurement"]), number=1)
    from_json = read_section(str(sources["validation"]), number=1)
    shown = [json.dumps(found["blocks"][:3]) for found in (from_file, from_json)]
    assert shown[0] == shown[1]


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


def test_other_cost_models_make_a_report_too(tmp_path: Path) -> None:
    """Guards --cost: the paper's terms have no exposed time, and ranks of others stand beside."""
    line = "--gpus 64 --model 5b --cost paper --cost alpha-beta --top 3"
    good(f"{line} --html {tmp_path}/r.html")
    document = json.loads(good(f"{line} --format json").out)
    sections = data_of((tmp_path / "r.html").read_text("utf-8"))["sections"]
    assert isinstance(sections, list)
    table = titled(sections[0], "table", "Ranking")
    assert values(table, "communication_s")[:3] == [config["communication_s"] for config in document["configs"]]
    assert values(table, "rank_alpha-beta")[:3] == [config["ranks"]["alpha-beta"] for config in document["configs"]]
    panel = next(blocks(sections[0], "configurations"))
    terms = next(one for one in blocks({"blocks": panel["items"][0]["blocks"]}, "table"))
    assert values(terms, "seconds") == [term["seconds"] for term in document["configs"][0]["terms"]]


def test_a_folder_without_a_summary_is_no_run(tmp_path: Path) -> None:
    """Guards the message for runs that did not finish."""
    with pytest.raises(UsageError, match=r"not the folder of a finished run: it has no summary\.json"):
        read_section(str(tmp_path), number=1)


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
        ("validation", ("configurations", 0), "losses"),
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


def test_html_beside_every_command(tmp_path: Path) -> None:
    """Guards --html of search, explain, sweep and compare: the file is written, standard output stays as it is."""
    plain = good("--gpus 8 --model nano --format csv").out
    assert good(f"--gpus 8 --model nano --format csv --html {tmp_path}/a.html").out == plain
    good(f"sweep --gpus 1,2 --model nano --html {tmp_path}/b.html")
    line = "explain --gpus 8 --model nano --pick 2"
    assert good(f"{line} --html {tmp_path}/d.html").out == good(line).out
    good(f"compare --gpus 8 --model nano --html {tmp_path}/c.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html", "c.html", "d.html"]


@pytest.mark.parametrize("words", ["torchtitan-8b.sh", "zero3.json --seq 4096 --gpus 64 --model llama3-8b"])
def test_a_run_one_has_makes_a_report(tmp_path: Path, words: str) -> None:
    """Guards `explain --from-command --html`: the run's own step, what was assumed, and what would make it faster."""
    line = f"explain --from-command tests/fixtures/commands/{words} --machine dgx-h100 --format json"
    document = json.loads(good(f"{line} --html {tmp_path}/r.html").out)
    (section,) = data_of((tmp_path / "r.html").read_text("utf-8"))["sections"]  # type: ignore[misc]
    assert page.interval_words(document["config"]) in section["verdict"][0]
    assert titled(section, "figure", "Gap to peak")
    titles = [one["title"] for one in blocks(section, "command")]
    assert {f"{one['words']}: {one['gain']:.1%} less time" for one in document["changes"]} <= set(titles)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.9, 25.0, [1, 2, 5, 10, 20]),
        (3.0, 8000.0, [10, 100, 1000]),
        (11.0, 12.0, [11.0, 12.0]),
        (7.0, 7.0, [7.0]),
    ],
)
def test_ticks_are_round_and_few(low: float, high: float, ticks: list[float]) -> None:
    """Guards scales: round numbers within the range, and the ends where there is none."""
    assert page.round_ticks(low, high) == pytest.approx(ticks)


def test_ticks_of_memory_are_round_in_its_unit() -> None:
    """Guards memory: whole GiB, not whole billions of bytes."""
    assert page.round_ticks(1.5 * 2**30, 12.0 * 2**30, unit=2.0**30) == pytest.approx(
        [2 * 2**30, 5 * 2**30, 10 * 2**30]
    )
