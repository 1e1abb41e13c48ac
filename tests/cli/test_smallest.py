"""`--gpus min`: the table of sizes, scripts with what it takes, which are read back, and what it does not go with."""

from __future__ import annotations

from pathlib import Path

import pytest

import axonn_tune
from tests.cli.running import good, run

ASKED = (
    "--gpus min --model llama3-8b --machine dgx-h100 --framework megatron-core --set machine.accelerator.memory_gib=50"
)


def test_the_smallest_number_with_its_script(tmp_path: Path) -> None:
    """Guards `--gpus min`: two sizes with what each takes as the framework's arguments, which are in the script that is
    written, and read back by `explain --from-command` as the run that was priced; the ranking is of that number."""
    script = tmp_path / "run.sh"
    found = good(f"{ASKED} --format json -o {script}").document
    sizes, text = found["smallest"]["sizes"], script.read_text("utf-8").replace("\\\n", " ")
    assert (found["smallest"]["gpus"], found["smallest"]["without_savers"]) == (2, 4)
    assert [one["gpus"] for one in sizes] == [2, 4]
    moved = found["smallest"]["with_offload"]
    assert moved["gpus"] == 1
    assert 0.0 < moved["added_s"] < moved["iteration_s"]
    assert found["gpus"] == 2
    assert [one["title"] for one in sizes[0]["took"]][-2:] == ["BF16 gradients", "BF16 moments"]
    words = " ".join(text.split())
    for one in sizes[0]["took"]:
        for argument in one["arguments"].split(" --"):
            assert argument.removeprefix("--") in words
    assert found["configs"][0]["iteration_s"] == sizes[0]["config"]["iteration_s"]
    read = good(
        f"explain --from-command {script} --machine dgx-h100 --set machine.accelerator.memory_gib=50 --format json"
    ).document
    assert read["fit"]["needed_bytes"] == pytest.approx(sizes[0]["config"]["memory_bytes"], rel=1e-3)
    assert read["config"]["iteration_s"] == pytest.approx(sizes[0]["config"]["iteration_s"], rel=1e-6)


def test_tables_of_sizes(tmp_path: Path) -> None:
    """Guards the table, its CSV, `sweep` from the smallest number on, and `explain` of its first layout."""
    shown = good(f"{ASKED} --html {tmp_path / 'page.html'}")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "The fewest: 2 GPUs. What it takes: " in page
    assert "BF16 gradients: --grad-reduce-in-bf16" in page
    assert "BF16 gradients: --grad-reduce-in-bf16" in shown.out
    assert "The fewest GPUs without these options, recompute aside: 4." in shown.out
    assert "1 GPU would do with precision-aware optimizer, BF16 gradients, optimizer in host memory: " in shown.out
    header, first, *_ = good(f"{ASKED} --format csv").out.splitlines()
    assert header.startswith("gpus,room,memory_bytes")
    assert first.startswith("2,")
    swept = good(f"sweep {ASKED.replace('min', 'min..')} --format json").document["points"]
    assert [one["gpus"] for one in swept] == [2, 3, 4]
    assert swept[0]["options"] == "--grad-reduce-in-bf16 --use-precision-aware-optimizer bf16"
    listed = good(f"sweep {ASKED.replace('min', 'min..')}").out
    assert "BF16 gradients: --grad-reduce-in-bf16; BF16 moments: --use-precision-aware-optimizer bf16" in listed
    ranged = good(f"sweep {ASKED.replace('min', 'min..8x2')} --format json").document["points"]
    assert [one["gpus"] for one in ranged] == [2, 4, 8]
    assert good(f"explain {ASKED}").out.startswith("tight: ")


def test_a_subcommand_stands_in_place_of_another() -> None:
    """Guards the arguments of torchtitan, whose recompute is a subcommand."""
    shown = good("--gpus min --model llama3-8b --machine dgx-h100 --framework torchtitan --tp 2").out
    assert "recompute selective: activation-checkpoint:selective\n" in shown


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"{ASKED} --all", "--gpus min lists numbers of GPUs: leave out --all."),
        (f"compare {ASKED}", "give this a number of GPUs"),
        (f"sweep {ASKED} --weak", "--gpus min: leave out --weak"),
        (f"sweep {ASKED.replace('min', 'min..x')}", "no range such as"),
        (ASKED.replace("min", "least"), "'least' is no whole number and not min"),
    ],
)
def test_what_it_does_not_go_with(line: str, words: str) -> None:
    """Guards options that say nothing beside it: refused, not ignored."""
    refused = run(line)
    assert refused.code == 2
    assert words in " ".join(refused.err.split())


def test_python_has_the_same() -> None:
    """Guards `search(gpus="min")`: a ranking at the smallest number, with its sizes."""
    found = axonn_tune.search("llama3-8b", "min", machine="dgx-h100", framework="megatron-core")
    assert found.best.grid.world == 2
    assert found.sizes is not None
    assert [len(row.took) for row in found.sizes.rows] == [1, 0]
