"""What evidence files are, recognised by their content, and what is made of them on one profile."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest

from axonn_tune.errors import AxonnTuneError, DocumentError, UsageError
from axonn_tune.learning.reading import Evidence, EvidenceRequest, read_evidence, with_nodes
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.document import to_yaml
from axonn_tune.validation.published.rows import SHIPPED
from tests.unit.learning import test_traces
from tests.unit.learning.test_collective_logs import NCCL_JSON, OSU, TEXT, written
from tests.unit.learning.test_training_logs import OLD, TITAN
from tests.unit.validation import made

MODEL = {"layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8", "ffn": "14336", "vocab": "128256"}
EIGHT = TEXT.replace("n2 device", "n1 device")
"""A log of two ranks of one node."""


def rows(folder: Path, *, name: str = "steps.csv", keep: str = "torchtitan-0001", **changes: str) -> Path:
    """One published row, with some cells changed."""
    with (SHIPPED / "steps.csv").open(encoding="utf-8", newline="") as file:
        (record,) = [one for one in csv.DictReader(file) if one["id"] == keep]
    del record["source"]
    with (folder / name).open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, record)
        table.writeheader()
        table.writerow({**record, **changes})
    return folder / name


def titan(folder: Path, *, before: str = "") -> Path:
    """A log of torchtitan: 8B on 8 H100, which says nothing of the model's sizes."""
    return written(folder, before + "\n".join(TITAN) + "\n", "titan.log")


def evidence(*paths: Path, **options: object) -> Evidence:
    """What some files hold."""
    return read_evidence(EvidenceRequest(paths=paths, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["rows", "titan", "megatron", "nccl", "json", "osu", "trace", "trace.gz", "measured"])
def test_each_kind_is_recognised_by_its_content(name: str, tmp_path: Path) -> None:
    """Guards the reader: no file's name says what it is, but the suffix of a compressed trace."""
    file = tmp_path / "evidence"
    options: dict[str, object] = {"machine": "dgx-h100"}
    if name == "rows":
        rows(tmp_path).rename(file)
    elif name == "titan":
        titan(tmp_path).rename(file)
        options["facts"] = MODEL
    elif name == "megatron":
        file.write_text("\n".join(OLD), "utf-8")
        options |= {"model": "5b", "facts": {"seq": 2048, "mbs": 1}}
    elif name in ("nccl", "json", "osu"):
        file.write_text({"nccl": EIGHT, "json": json.dumps(NCCL_JSON), "osu": OSU}[name], "utf-8")
        options |= {"ranks": 8, "nodes": 1}
    elif name.startswith("trace"):
        data = json.dumps(test_traces.DOCUMENT).encode()
        file = file.with_suffix(".gz") if name.endswith("gz") else file
        file.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    else:
        file.write_text(to_yaml(made.measurements()), "utf-8")
        options = {}
    found = evidence(file, **options)
    kinds = {"rows": "1 step on 8", "titan": "1 step on 8", "megatron": "1 step on 128", "nccl": "2 collectives"}
    kinds |= {"json": "1 collective", "osu": "2 collectives", "trace": "5 times", "trace.gz": "5 times"}
    expected = kinds.get(name, "configurations on 8 ranks")
    assert expected in found.sources[0]
    assert found.samples
    assert all(
        seconds > 0.0 for sample in found.samples for seconds in (*sample.measured_s, *sample.price(lambda m: m))
    )


def test_a_log_may_say_much_before_its_steps(tmp_path: Path) -> None:
    """Guards logs with pages of other output first, some of which has words of other formats."""
    noise = "NCCL INFO Channel 00 : 0[0] -> 1[1] via P2P/CUMEM\n" * 2000
    warning = "UserWarning: an out-of-place operation; '\"ph\"'\n"
    found = evidence(titan(tmp_path, before=warning + noise), machine="dgx-h100", facts=MODEL)
    assert "1 step on 8" in found.sources[0]
    log = written(tmp_path, EIGHT.replace("# nThread", f"{noise}# nThread"), "all_gather.txt")
    assert "2 collectives" in evidence(log, machine="dgx-h100").sources[0]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("notes.txt", "It was fast.\n", "notes.txt' is no kind of evidence that can be read"),
        ("empty.csv", "\n", "empty.csv' is empty"),
        ("all_gather.txt", EIGHT.replace("(us)", "(ms)"), r"all_gather.txt:11: the column of times is not in \(us\)"),
        (
            "steps.csv",
            "id,gpu,n_gpus,framework,layers,hidden,heads,ffn,vocab,seq,gbs\n1,H100,x,nemo\n",
            "steps.csv:2: 1: n_g",
        ),
        (
            "train.log",
            "\n".join(OLD).replace("(ms)", "(mph)"),
            r"train.log:\d+: states a step's time in 'mph'",
        ),
        ("measured.yaml", "schema: axonn-tune/measurement/2\nstep: 3\n", "measured.yaml:2"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(name: str, text: str, message: str, tmp_path: Path) -> None:
    """Guards mistakes: the file, and where it can be said the line."""
    path = written(tmp_path, text, name)
    with pytest.raises((UsageError, DocumentError), match=message):
        evidence(path, machine="dgx-h100")


def test_folders_that_are_no_finished_runs(tmp_path: Path) -> None:
    """Guards runs that have not ended, and those of versions that kept no launch config."""
    with pytest.raises(UsageError, match=r"has no summary\.json: it is not the folder of a run that has ended"):
        evidence(tmp_path)
    (tmp_path / "summary.json").write_text("{}", "utf-8")
    for path in (tmp_path, tmp_path / "summary.json"):
        with pytest.raises(UsageError, match=r"has no launch\.yaml"):
            evidence(path)


def test_what_a_log_does_not_say(tmp_path: Path) -> None:
    """Guards LOG.yaml beside a log, options over it, and the message where neither says it."""
    log = titan(tmp_path)
    with pytest.raises(UsageError, match=r"titan.log:\d+: the log does not state layers, hidden, heads, ffn, vocab"):
        evidence(log, machine="dgx-h100")
    beside = tmp_path / "titan.yaml"
    beside.write_text("".join(f"{name}: {value}\n" for name, value in MODEL.items()) + "gated_mlp: 1\n", "utf-8")
    (sample,) = evidence(log, machine="dgx-h100").samples
    (other,) = evidence(log, machine="dgx-h100", facts=["layers=16"]).samples
    assert other.price(lambda one: one)[0] < 0.7 * sample.price(lambda one: one)[0]
    (same,) = evidence(log, machine="dgx-h100", model="llama3-8b").samples
    assert same.price(lambda one: one) == sample.price(lambda one: one)
    beside.write_text("layerz: 32\n", "utf-8")
    with pytest.raises(UsageError, match=r"titan\.yaml'?.*no column 'layerz', did you mean 'layers'"):
        evidence(log, machine="dgx-h100")
    beside.write_text("layers: 32\nhead_dim: 0\n", "utf-8")
    with pytest.raises(DocumentError, match=r"titan\.yaml:2: head_dim: not a whole number from 1"):
        evidence(log, machine="dgx-h100")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (["tpp=8"], "--fact tpp: no such column, did you mean 'tp'"),
        (["tp"], "--fact tp: write COLUMN=VALUE"),
        (["=8"], "--fact =8: write COLUMN=VALUE"),
        (["mtp=inf"], "--fact mtp=inf: mtp is 'inf'; known: 0 to 9, on, off"),
        (["vocab_multiple=[]"], r"not a whole number from 0 to 2,147,483,647"),
        (["grad_accum=0"], "--fact grad_accum=0: not a whole number from 1 to 2,147,483,647; nearest valid: 1"),
        (["mfu_percent=-3"], r"--fact mfu_percent=-3: not a number from 1e-12 to 1e\+18"),
        (["loss=foo"], "--fact loss=foo: loss is 'foo'; known: in_place, fused"),
        (["dispatcher=depep"], "--fact dispatcher=depep: dispatcher is 'depep', did you mean 'deepep'"),
        (["attn=flas"], "--fact attn=flas: attn is 'flas', did you mean 'flash'"),
        ({"recomputed": 1}, "--fact recomputed: no such column, did you mean 'recompute'"),
    ],
)
def test_facts_that_are_none(facts: object, message: str, tmp_path: Path) -> None:
    """Guards options: what is no column is named with the nearest, whatever the evidence is."""
    with pytest.raises(UsageError, match=message):
        evidence(rows(tmp_path), facts=facts)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"tp": "4"}, r"titan.log:\d+: the log states tp 1, but 4 is given"),
        ({"gpu": "A100"}, r"titan.log:\d+: the log states gpu NVIDIA H100, but A100 is given"),
        ({"precision": "float"}, r"titan.log:\d+: precision is 'float'"),
        ({"kv_heads": "7"}, r"titan.log:\d+: heads is 32, not divisible by kv_heads, 7"),
    ],
)
def test_contradictions_between_log_and_options(facts: dict[str, str], message: str, tmp_path: Path) -> None:
    """Guards against learning from another run than the user means."""
    with pytest.raises(AxonnTuneError, match=message):
        evidence(titan(tmp_path), machine="dgx-h100", facts={**MODEL, **facts})


def test_blank_cells_are_what_is_given(tmp_path: Path) -> None:
    """Guards rows of a CSV: facts, model and framework fill blank cells and missing columns, and contradict none."""
    whole = rows(tmp_path, recompute="none", framework="torchtitan")
    (stated,) = evidence(whole).samples
    sizes = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "gated_mlp"), "")
    blank = rows(tmp_path, name="blank.csv", recompute="", framework="", **sizes)
    options = {"model": "llama3-8b", "framework": "torchtitan", "facts": ["recompute=none"]}
    (given,) = evidence(blank, **options).samples
    assert given.price(lambda one: one) == stated.price(lambda one: one)
    assert "recompute" not in given.unstated
    assert "recompute" in evidence(blank, **{**options, "facts": ()}).samples[0].unstated
    with pytest.raises(DocumentError, match=r"blank\.csv:2: .*: framework is blank"):
        evidence(blank, model="llama3-8b")
    with pytest.raises(UsageError, match=r"steps\.csv:2: the file states layers 32, but 80 is given"):
        evidence(whole, model="llama3-70b")
    with pytest.raises(DocumentError, match=r"steps\.csv:2: .*: framework is torchtitan, but megatron-core is given"):
        evidence(whole, framework="megatron-core")
    said = evidence(rows(tmp_path, name="plain.csv", kv_heads="", gated_mlp="")).assumed
    assert any("kv_heads is blank, so as many as heads and gated_mlp is blank" in words for words in said)


def test_the_base_profile_is_the_nearest(tmp_path: Path) -> None:
    """Guards the choice, which is said; rows of two machines, or a log of collectives, ask for --machine."""
    found = evidence(rows(tmp_path))
    assert found.machine.name == "grand-teton-h100"
    assert "base profile grand-teton-h100, the nearest to what the rows say; --machine names another" in found.assumed
    more = rows(tmp_path, name="more.csv", gpu="A100-SXM", system="DGX")
    with pytest.raises(UsageError, match="its rows are of dgx-a100, grand-teton-h100; name the nearest with --machine"):
        evidence(tmp_path / "steps.csv", more)
    with pytest.raises(UsageError, match="does not say on which machine it ran; name the nearest with --machine"):
        evidence(written(tmp_path, EIGHT, "all_gather.txt"))
    assert evidence(tmp_path / "steps.csv", more, machine="dgx-h200").machine.name == "dgx-h200"


def test_rows_of_another_machine_are_named_and_impossible_ones_left_out(tmp_path: Path) -> None:
    """Guards what is priced all the same, and what cannot be, each with its line."""
    found = evidence(rows(tmp_path), machine="dgx-a100")
    assert any("steps.csv:2: gpu is 'H100-SXM', the accelerator of dgx-a100 is" in words for words in found.assumed)
    said = "steps.csv:2: number format 'int8' is not modelled: bf16, fp16, fp32, fp64, fp8-delayed, fp8-current, "
    said += "fp8-rowwise, fp8-blockwise, mxfp8, nvfp4, mxfp4 are"
    both = [rows(tmp_path, precision="int8"), rows(tmp_path, name="more.csv")]
    found = evidence(*both, machine="dgx-h100")
    assert (len(found.samples), found.left_out) == (1, (said,))
    with pytest.raises(UsageError, match=f"nothing to learn from:\n{said}"):
        evidence(both[0], machine="dgx-h100")
    with pytest.raises(UsageError, match=r"steps.csv' has no row with a time \(column step_s\)"):
        evidence(rows(tmp_path, step_s=""))


def test_a_profile_of_one_level_gets_nodes() -> None:
    """Guards `--ranks-per-node`: the innermost tier holds a node, the outer one has the same rates, all of it valid."""
    base = load_machine("localhost").document
    found = with_nodes(base, 4)
    assert [(tier.name, tier.ranks) for tier in found.tiers] == [("node", 4), ("network", None)]
    assert {tier.bandwidth_gb_per_s for tier in found.tiers} == {base.tiers[0].bandwidth_gb_per_s}
    assert type(base).model_validate(found.model_dump(by_alias=True, exclude_unset=True)) == found


def test_nodes_come_from_options_or_measurements_that_have_several(tmp_path: Path) -> None:
    """Guards where nodes come from, that it is said, and that a profile with two levels keeps them."""
    log = written(tmp_path, OSU, "osu.txt")
    found = evidence(log, machine="localhost", ranks=8, nodes=2, ranks_per_node=4)
    assert [tier.ranks for tier in found.machine.tiers] == [4, None]
    assert "localhost has one network level; nodes of 4 ranks get one of their own" in found.assumed
    assert len(evidence(log, machine="localhost", ranks=8, nodes=1).machine.tiers) == 1
    with pytest.raises(UsageError, match="dgx-h100 has several"):
        evidence(log, machine="dgx-h100", ranks=8, nodes=1, ranks_per_node=4)
    measured = written(tmp_path, to_yaml(made.measurements()), "measured.yaml")
    assert [tier.ranks for tier in evidence(measured, machine="localhost").machine.tiers] == [4, None]
