"""A framework that is a description and nothing else: search, explain, trace and report work with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import axonn_tune
from axonn_tune.errors import UnknownNameError, UsageError
from axonn_tune.frameworks import register, registry
from axonn_tune.frameworks.command import flags, sections_of
from axonn_tune.frameworks.description import Command, Framework, PipelineSchedule, Refusal, Run
from axonn_tune.frameworks.step import StepOptions
from axonn_tune.learning.stated import read_run
from tests.cli.running import good, run

MADE_UP = Framework(
    name="made-up",
    title="Made-up",
    axes=("z", "x", "context", "data", "pipeline"),
    source="these tests",
    step=StepOptions(
        sequence_parallel=True,
        gather_unit="block",
        reshard="never",
        whole_rows=False,
        reduction="whole",
        gradient_bytes=2,
        context_exchange="all_to_all",
        loss_chunks=1,
        replicated_tables=("embedding",),
        vocabulary_multiple=64,
        overlaps=("gather_prefetch", "weight_gradient"),
    ),
    schedule=PipelineSchedule(overlapped=True, scattered=False),
    refused=(Refusal(("z", "context"), "made-up cannot shard weights beside context ranks"),),
)
GIVEN = {"gpus": 16, "machine": "perlmutter-80gb", "batch": 64}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """The registry with it, and afterwards without."""
    before = dict(registry())
    register(MADE_UP)
    yield
    registry().clear()
    registry().update(before)


def test_a_ranking_has_its_axes_and_order() -> None:
    """Guards search and its page: every layout is one of its own axes, in its rank order, by its own step options."""
    given = {**GIVEN, "gpus": 8}
    found = axonn_tune.search("5b", framework="made-up", pipeline=True, top=0, **given)
    assert len(found) > 5
    assert {entry.framework for entry in found} == {"made-up"}
    assert all(entry.y == 1 for entry in found)
    assert not [entry for entry in found if entry.z > 1 and entry.grid.context > 1]
    assert max(entry.pipeline for entry in found) > 1
    assert max(entry.grid.context for entry in found) > 1
    steps_s = [entry.iteration_s for entry in found]
    assert steps_s == sorted(steps_s), "ranked by the step, as said in its description"
    assert [axis for axis in found.best.order if axis in MADE_UP.axes] == list(MADE_UP.axes)
    refused = [grid.reasons for grid in found.ranked.rejected()]
    assert any("cannot shard weights beside context ranks" in why for reasons in refused for _, why in reasons)
    assert "made-up" in json.dumps(found.section(source="test"))


def test_a_framework_says_where_it_was_measured() -> None:
    """Guards what is compared: all that ship but the bundled runtime name GPUs and a source; a made-up one does not."""
    assert [name for name, one in registry().items() if not one.measured_on] == ["axonn-tune", "made-up"]
    named = [one.measured_on for one in registry().values() if one.measured_on]
    assert all(re.search(r"[0-9,]+ (A100|H100|GPUs)|all frameworks", one) for one in named)
    found = axonn_tune.compare("5b", framework="made-up", **GIVEN)
    assert found["made-up"].prediction is not None
    assert (found["made-up"].measured, found.baseline.key) == (False, next(iter(found)).key)


def test_a_configuration_is_explained_and_traced() -> None:
    """Guards explain and trace, with and without stages: its operations and no others, ending where the step ends."""
    for sizes in ({"z": 4, "x": 2, "pipeline": 1}, {"context": 2, "x": 2, "pipeline": 2}, {"z": 2, "pipeline": 4}):
        found = axonn_tune.explain("5b", framework="made-up", **sizes, **GIVEN)
        assert "attention.qkv" not in {term.layer for term in found.priced.terms if term.axis == "z"}
        assert ("block" in {term.layer for term in found.priced.terms}) == (found.priced.z > 1)
        assert json.loads(found.to_json())["config"]["framework"] == "made-up"
        assert found.words
        assert found.render()
        events = json.loads(found.trace().text)["traceEvents"]
        assert max(event.get("ts", 0) + event.get("dur", 0) for event in events) > 0


@pytest.mark.nightly
def test_the_command_line_takes_its_name() -> None:
    """Guards `--framework`: a registered name is enough for search and explain, as table and as JSON; an axis that it
    has not is refused, and so is a name that nobody has."""
    line = "--gpus 16 --model 5b --machine perlmutter-80gb --batch 64 --framework made-up"
    found = good(f"{line} --pipeline --format json").document
    assert {config["framework"] for config in found["configs"]} == {"made-up"}
    assert good(f"{line} --top 3").out
    assert good(f"explain {line} --x 2 --pipeline 2").out
    assert run(f"{line} --y 2").code == UsageError.exit_code
    with pytest.raises(UnknownNameError, match="made-up"):
        axonn_tune.search("5b", framework="made-upp", **GIVEN)


KEYS = """key,also,field,default,plain,status,why
tensor_ways,,x,1,,modelled,
shard_ways,,z,1,,modelled,
copy_ways,,replicas,1,,modelled,
local_size,,micro_batch,,,modelled,
total_size,,batch,,,modelled,
"""


def launch(run: Run) -> Command:
    """A program with those five arguments."""
    values = {**run.fields, "replicas": run.size("data")}
    names = "tensor_ways shard_ways copy_ways local_size total_size"
    return Command("X-Titan 1", ("-m", "x_titan.train"), sections_of({"layout": flags(names, values, "x-titan")}))


def test_a_framework_with_keys_of_its_own_is_written_and_read(tmp_path: Path) -> None:
    """Guards both directions: five keys beside a description are all that a script needs to be written and read, and
    options by those names."""
    step = StepOptions(gather_unit="block")
    names, axes = {"x": "tw", "z": "sw", "data": "cw"}, ("x", "z", "data")
    described = Framework("x-titan", "X-Titan", axes, "x", step, software="eager", names=names)
    register(replace(described, launch=launch, keys=KEYS))
    found = axonn_tune.search("5b", framework="x-titan", tensor_ways=2, sw=2, recompute="full", **GIVEN)
    path, *_ = found.write_launch_config(tmp_path / "run.sh")
    read = read_run(path, given={"recompute": "full"}, model="5b", needed=("n_gpus", "gbs"))
    assert (read.software, read.unknown) == ("x-titan", ())
    said = {name: read.columns[name].value for name in ("n_gpus", "tp", "z", "dp", "mbs", "gbs")}
    assert said == {"n_gpus": 16, "tp": 2, "z": 2, "dp": 8, "mbs": found.best.micro_batch, "gbs": 64}
