"""The section of a ranking: every number it has is the JSON contract's."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest

import axonn_tune
from axonn_tune.grid import AXES
from axonn_tune.report.output import Json
from axonn_tune.report.page import BY_KIND
from axonn_tune.report.ranking import TRAINING
from axonn_tune.report.ranking_section import (
    BREAKDOWN,
    DETAILED,
    MOST_ROWS,
    PAGE_COLUMNS,
    ranking_of,
    ranking_section,
)
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import load_document
from tests.cli.running import good
from tests.unit.report.pages import blocks, ranking, titled, values

_MADE_OF_SEVERAL = {"state", "rejected_because", "wide_order"}


@pytest.fixture(scope="module")
def section() -> Json:
    """The section of 80b on 1,024 GPUs."""
    return ranking_section(ranking(), identity="s1", source="test")


def test_the_table_has_every_number_of_every_configuration(section: Json) -> None:
    """Guards the data: nothing is rounded, dropped or moved to another row."""
    table = titled(section, "table", "Ranking")
    configs = ranking()["configs"]
    assert table["rows"] == len(configs)
    for column in table["columns"]:
        if column["key"] not in _MADE_OF_SEVERAL:
            key = column["key"]
            assert values(table, key) == [config[key] for config in configs], key
    missing = {column.key for column in PAGE_COLUMNS} - {column["key"] for column in table["columns"]}
    assert missing == set(TRAINING[:3]), "of a training whose tokens nobody has said"


def test_bars_add_up_to_the_step_and_to_all_communication(section: Json) -> None:
    """Guards the figure of shares: thick bars are the step, exposed and hidden parts all communication."""
    figure = titled(section, "figure", BREAKDOWN)["figure"]
    for place, config in enumerate(ranking()["configs"][:DETAILED]):
        thick, thin, waiting = 0.0, 0.0, 0.0
        for trace in (one for one in figure["data"] if one["type"] == "bar"):
            for at, seconds in zip(trace["y"], trace["x"], strict=True):
                if round(at) != place:
                    continue
                apart = trace["width"] < 0.3
                thick += 0.0 if apart else seconds
                thin += seconds if apart else 0.0
                waiting += seconds if not apart and trace["name"] not in BY_KIND else 0.0
        assert thick == pytest.approx(config["iteration_s"], rel=1e-9)
        assert waiting == pytest.approx(config["exposed_communication_s"], rel=1e-6)
        assert thin + waiting >= config["communication_s"] * (1 - 1e-9)


def test_what_a_configuration_spends_adds_up() -> None:
    """Guards two beside each other: parts that sum to the step and to the memory, of pipelines too."""
    given = {"machine": "dgx-h100", "framework": "megatron-core", "pipeline": 2}
    found = axonn_tune.search("llama3-8b", gpus=16, **given)  # type: ignore[arg-type]
    for document in (ranking(), ranking_of(found.results)):
        section = ranking_section(document, identity="s1", source="test")
        for item, config in zip(next(blocks(section, "configurations"))["items"], document["configs"], strict=False):
            step, memory = (sum(quantity["values"].values()) for quantity in item["spent"])
            assert step == pytest.approx(config["iteration_s"], rel=1e-6)
            assert memory == pytest.approx(config["memory_bytes"], abs=1.0)


def test_a_launch_config_to_copy_loads(tmp_path: Path) -> None:
    """Guards what is copied: it is the launch config of its own row, and its command writes the same."""
    section = ranking_section(ranking(), identity="s1", source="test")
    for place in (0, 4):
        config, item = ranking()["configs"][place], next(blocks(section, "configurations"))["items"][place]
        copied = titled({"blocks": item["blocks"]}, "fold", "Launch config to copy")
        path = tmp_path / "launch.yaml"
        path.write_text(copied["blocks"][0]["line"], "utf-8")
        launch = load_document(path, schema=Launch)
        assert {axis: getattr(launch.grid, axis) for axis in AXES} == {axis: config[axis] for axis in AXES}
        assert launch.predicted is not None
        assert launch.predicted.iteration_s == pytest.approx(config["iteration_s"])
        assert (launch.micro_batch, launch.kept_layers) == (config["micro_batch"], config["kept_layers"])
    written = launch.provenance.command.removeprefix("axonn-tune ").replace("launch.yaml", str(tmp_path / "again.yaml"))
    good(written)
    again = load_document(tmp_path / "again.yaml", schema=Launch)
    assert again.model_copy(update={"provenance": None}) == launch.model_copy(update={"provenance": None})


def test_a_picked_configuration_of_the_ranking_is_shown_once() -> None:
    """Guards launch configs of the first: no bar and no detail twice."""
    picked = deepcopy(ranking()["configs"][3])
    section = ranking_section(ranking(), identity="s1", source="test", picked=picked)
    items = next(blocks(section, "configurations"))["items"]
    assert [item["row"] for item in items] == [3, 0, 1, 2, *range(4, DETAILED)]
    names = titled(section, "figure", BREAKDOWN)["figure"]["layout"]["yaxis"]["ticktext"]
    assert [name.split()[0] for name in names[:2]] == ["launch", "#1"]


def test_a_long_ranking_is_cut_and_says_so() -> None:
    """Guards the size of the file: more rows than fit are left out, rejected ones first."""
    document = deepcopy(ranking())
    first = document["configs"][0]
    document["configs"] = [{**first, "rank": rank} for rank in range(1, MOST_ROWS + 6)]
    section = ranking_section(document, identity="s1", source="test")
    assert titled(section, "table", "Ranking")["rows"] == MOST_ROWS
    said = titled(section, "text", "How sure")["sentences"]
    assert any(sentence.startswith("5 more rows are left out") for sentence in said)


def test_another_time_than_the_documents_is_named() -> None:
    """Guards old documents: what this version predicts anew is not passed off as theirs."""
    document = deepcopy(ranking())
    document["configs"] = document["configs"][:1]
    document["configs"][0]["iteration_s"] *= 1.5
    section = ranking_section(document, identity="s1", source="test")
    assert any("this version predicts" in block["sentences"][0] for block in blocks(section, "text"))


def test_nothing_feasible_is_a_report_too() -> None:
    """Guards the empty ranking: the reasons are what one wants to see."""
    document = deepcopy(ranking())
    document["configs"] = [config for config in document["configs"] if not config["feasible"]]
    section = ranking_section(document, identity="s1", source="test")
    assert section["verdict"] == ["No grid is feasible; the table says why for each."]
    assert not list(blocks(section, "cards"))
    assert next(blocks(section, "configurations"))["items"] == []


def test_every_number_of_the_machine_has_its_source(section: Json) -> None:
    """Guards provenance: value, kind and source of each number of the profile."""
    fold = titled(section, "fold", "Machine: ")
    table = next(blocks({"blocks": [fold]}, "table"))
    machine = ranking()["machine"]
    found = dict(
        zip(zip(values(table, "section"), values(table, "key"), strict=True), values(table, "source"), strict=True)
    )
    for key, source in machine["accelerator"]["sources"].items():
        assert found["accelerator", key] == source["source"]
    for tier in machine["tiers"]:
        for key, source in tier["sources"].items():
            assert found[f"tier {tier['name']}", key] == source["source"]


def test_pages_are_in_the_frameworks_names() -> None:
    """Guards pages of other frameworks: layouts and collectives in their names, priced as they were, with a command for
    one of them; pipeline stages and context included."""
    given = {"x": 2, "context": 2, "pipeline": 2, "machine": "dgx-h100", "framework": "megatron-core"}
    found = axonn_tune.search("llama3-8b", gpus=32, **given)  # type: ignore[arg-type]
    document = ranking_of(found.results)
    section = ranking_section(document, identity="s1", source="test")
    assert "with Megatron-Core" in section["title"]
    table = titled(section, "table", "Ranking")
    labels = [column["label"] for column in table["columns"]]
    assert labels[1:7] == ["TP", "GTP", "PP", "VPP", "CP", "DP"]
    assert values(table, "chunks") == [config["chunks"] for config in document["configs"]]
    panel = next(blocks(section, "configurations"))
    first = panel["items"][0]
    assert first["title"].startswith("#1: TP 2 · GTP ")
    line = next(blocks({"blocks": first["blocks"]}, "command"))["line"]
    assert "--framework megatron-core" in line
    assert "--tp 2" in line
    assert "--order" not in line
    said = str(section)
    assert "this version predicts" not in said, "priced as another framework"
    assert " over TP" in said
    assert "for all_gather over x" not in said
    assert good(line.removeprefix("axonn-tune ")).out.startswith(
        "llama3-8b on 32 × dgx-h100 (H100-SXM5-80GB) with Megatron-Core: TP=2"
    )
