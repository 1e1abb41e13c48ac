"""`extends`: what a derived file inherits, replaces, and has to say itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from axonn_tune.errors import DocumentError
from axonn_tune.specs.loading import load_document, load_file
from axonn_tune.specs.machine import Machine

MACHINE = Path(__file__).parent / "data" / "twotier.yaml"
HEAD = "schema: axonn-tune/machine/1\nextends: twotier\nname: mine\n"


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the base file in it, and no user catalog."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.delenv("AXONN_TUNE_PATH", raising=False)
    (tmp_path / "twotier.yaml").write_text(MACHINE.read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path


def derive(folder: Path, body: str, head: str = HEAD) -> Machine:
    """Load a file that extends the base."""
    path = folder / "mine.yaml"
    path.write_text(head + body, encoding="utf-8")
    return load_document(path, schema=Machine)


def problems(folder: Path, body: str, head: str = HEAD) -> list[str]:
    """What is wrong with a file that extends the base, without the folder's name."""
    with pytest.raises(DocumentError) as caught:
        derive(folder, body, head)
    return [line.replace(f"{folder}/", "") for line in str(caught.value).splitlines()]


def test_mappings_merge_and_the_rest_is_inherited(base: Path) -> None:
    """Guards the point of extends: a derived file says only what differs."""
    machine = derive(base, "launcher:\n  backend: nccl\naccelerator:\n  name: other chip\n")
    original = load_document(MACHINE, schema=Machine)
    assert (machine.name, machine.launcher.ranks_per_node, machine.launcher.backend) == ("mine", 2, "nccl")
    assert machine.accelerator.name == "other chip"
    assert (machine.tiers, machine.library) == (original.tiers, original.library)


def test_named_lists_merge_by_name(base: Path) -> None:
    """Guards tiers and environment variables: one changes without repeating the others, new ones come last."""
    sources = "sources: {bandwidth_gb_per_s: {kind: measured, source: here}}"
    body = f"tiers:\n  - name: network-1.0\n    bandwidth_gb_per_s: 20\n    {sources}\n"
    body += "launcher:\n  environment:\n    - {name: NEW, value: x, why: y}\n"
    machine = derive(base, body)
    assert [tier.bandwidth_gb_per_s for tier in machine.tiers] == [50, 20]
    assert machine.tiers[1].sources["bandwidth_gb_per_s"].source == "here"
    assert machine.tiers[1].sources["latency_us"].source == "invented"
    assert [variable.name for variable in machine.launcher.environment] == ["OMP_NUM_THREADS", "NEW"]


def test_a_changed_number_needs_its_own_source(base: Path) -> None:
    """Guards provenance: an inherited source must not vouch for a number it never gave."""
    body = "tiers:\n  - name: link\n    bandwidth_gb_per_s: 60\naccelerator:\n  peak_tflops: {bf16: 99}\n"
    assert problems(base, body) == [
        "mine.yaml:6: tiers.link.bandwidth_gb_per_s: "
        "changes a number without its provenance: add sources.bandwidth_gb_per_s beside it",
        "mine.yaml:8: accelerator.peak_tflops: "
        "changes a number without its provenance: add sources.peak_tflops beside it",
    ]


def test_a_restated_source_is_complete(base: Path) -> None:
    """Guards provenance against an old document beside a new kind: entries are replaced whole."""
    body = "tiers:\n  - name: link\n    bandwidth_gb_per_s: 7\n    sources: {bandwidth_gb_per_s: {kind: measured}}\n"
    (found,) = problems(base, body)
    assert found.startswith("mine.yaml:7: tiers.link.sources.bandwidth_gb_per_s: missing key 'source'")


def test_a_number_that_is_removed_takes_its_source_along(base: Path) -> None:
    """Guards null for optional numbers."""
    own = "  vector_tflops: {fp32: 5}\n  sources:\n    vector_tflops: {kind: peak, source: invented}\n"
    text = MACHINE.read_text("utf-8").replace("  sources:\n", own, 1)
    (base / "twotier.yaml").write_text(text, encoding="utf-8")
    assert "vector_tflops" not in derive(base, "accelerator: {vector_tflops: null}\n").accelerator.sources


@pytest.mark.parametrize(
    ("name", "words"),
    [("network-1", "did you mean 'network-1.0'?"), ("fabric", "only link, network-1.0")],
)
def test_an_incomplete_new_tier_may_be_a_misspelt_one(base: Path, name: str, words: str) -> None:
    """Guards against asking for the other keys of a tier that was only misspelt."""
    found = problems(base, f"tiers:\n  - name: {name}\n    bandwidth_gb_per_s: 20\n")
    assert found[0] == f"mine.yaml:5: tiers.{name}: twotier has no tier {name!r}, {words}"
    assert any("missing key 'latency_us'" in line for line in found)
    (library,) = [line for line in problems(base, "library:\n  protocols: [{name: simpel}]\n") if "has no" in line]
    assert library.endswith("twotier has no protocol 'simpel', did you mean 'simple'?")


@pytest.mark.parametrize("other", ["mine.yaml", "./mine.yaml", "loop"])
def test_circles_are_refused(base: Path, other: str) -> None:
    """Guards against files that extend each other without end."""
    (base / "loop.yaml").write_text(HEAD.replace("twotier", "mine").replace("name: mine", "name: l"), encoding="utf-8")
    (found,) = problems(base, "", HEAD.replace("twotier", other))
    assert "extend each other in a circle" in found


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("twoteir", "no machine named 'twoteir'"),
        ("twoteir.yaml", "did you mean 'twotier.yaml'?"),
        ("[a, b]", "must be one name or path"),
        ("", "must be one name or path"),
    ],
)
def test_a_base_that_is_not_there_is_explained(base: Path, wanted: str, words: str) -> None:
    """Guards the line and the near miss of a wrong extends."""
    (found,) = problems(base, "", HEAD.replace("twotier", wanted))
    assert found.startswith("mine.yaml:2: extends: ")
    assert words in found


def test_the_hash_covers_the_base(base: Path) -> None:
    """Guards provenance: a change of the base changes what the derived file stands for."""
    derive(base, "")
    before = load_file(base / "mine.yaml", schema=Machine).sha256
    with (base / "twotier.yaml").open("a", encoding="utf-8") as file:
        file.write("# more\n")
    assert load_file(base / "mine.yaml", schema=Machine).sha256 != before
