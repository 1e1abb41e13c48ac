"""Public scripts and configs that others wrote: what is priced is what a careful reader finds in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from axonn_tune.errors import AxonnTuneError
from axonn_tune.learning.run import CommandRun
from axonn_tune.learning.stated import read_run
from axonn_tune.specs.catalog import load_machine
from axonn_tune.validation.published.cases import Case

FOLDER = Path(__file__).parents[2] / "fixtures" / "public_scripts"
EXPECTED: Mapping[str, Mapping[str, Any]] = yaml.safe_load((FOLDER / "expected.yaml").read_text("utf-8"))
REFUSED = {name: one for name, one in EXPECTED.items() if "refused" in one}
REFUSED |= {name: one["without"] for name, one in EXPECTED.items() if "without" in one}
H100 = load_machine("dgx-h100").document


def read(name: str, given: Mapping[str, object]) -> CommandRun:
    """The run of a file with what its user adds."""
    columns = {key: str(value) for key, value in given.items() if key != "model"}
    return read_run(FOLDER / name, given=columns, model=str(given["model"]) if "model" in given else None)


def priced(case: Case) -> dict[str, object]:
    """What the cost model gets, by the words of the field."""
    one, step = case.configurations[0], case.framework.step
    grid = one.grid
    zero = 3 if grid.z > 1 else 2 if step.shard_gradients else int(step.distributed_optimizer)
    sizes = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "gated", "biases")
    return {
        **{"gpus": grid.world, "tp": grid.x, "y": grid.y, "z": grid.z, "pp": grid.pipeline, "vpp": one.chunks},
        **{"cp": grid.context, "dp": grid.z * grid.data, "zero": zero},
        **{"batch": case.workload.global_batch, "micro_batch": one.micro_batch},
        **{"sequence": case.workload.sequence_length, "precision": case.workload.precision},
        **{"recompute": one.recompute, "parts": list(one.parts or ()), "tied": case.model.tied_embeddings},
        **{name: getattr(case.model, name) for name in sizes},
        "offloaded": [*step.offloaded],
    }


def plain(words: object) -> str:
    """Words with dashes as underscores, as the same argument is spelled in two ways."""
    return str(words).lower().replace("-", "_")


@pytest.mark.parametrize("name", [name for name, one in EXPECTED.items() if "priced" in one])
def test_public_files_are_read_as_a_careful_reader_does(name: str) -> None:
    """Guards GPUs, degrees, batch, model and formats of files that nobody here wrote, and what must be said of them."""
    expected = EXPECTED[name]
    run = read(name, expected.get("given", {}))
    found, said = priced(run.case(H100)), "\n".join((*run.assumed, *run.ignored, *run.unknown))
    assert {key: found[key] for key in expected["priced"]} == expected["priced"]
    assert run.software == expected["framework"]
    assert [words for words in expected.get("says", ()) if plain(words) not in plain(said)] == [], said
    assert [words for words in expected.get("never", ()) if words in said] == [], said
    assert sorted(run.unknown) == sorted(expected.get("unknown", ()))


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_file_leaves_open_or_is_not_modelled_is_refused_by_name(name: str) -> None:
    """Guards refusals of experts, unknown sizes, foreign trainers, and GPUs that only a shell or its job knows."""
    with pytest.raises(AxonnTuneError) as caught:
        read(name, REFUSED[name].get("given", {})).case(H100)
    assert REFUSED[name]["refused"] in str(caught.value)


def test_the_list_names_every_file() -> None:
    """Guards the list of sources: twenty files or more, each with its public place."""
    listed = (FOLDER / "README.md").read_text("utf-8")
    files = {path.name for path in FOLDER.iterdir()} - {"README.md", "expected.yaml"}
    assert files == set(EXPECTED)
    assert len(files) >= 20
    assert all(f"| `{name}` |" in listed for name in files)
