"""Lengths of sequences: packs, padded and flattened batches, and the wait for the rank with most, by hand."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from axonn_tune import explain, search
from axonn_tune.cost.price import price
from axonn_tune.errors import UsageError
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.keys import Stated
from axonn_tune.frameworks.step import StepOptions
from axonn_tune.grid import ALL_AXES
from axonn_tune.launch.commands import command_of
from axonn_tune.learning.trainers import stated_packing
from axonn_tune.program.lengths import (
    batched_tokens,
    length_symbols,
    micro_batch,
    own_tokens,
    padding,
    sequences_of,
    step_spread,
)
from axonn_tune.report.explain import gap_to_peak
from axonn_tune.specs.lengths import PRESETS, Lengths, read_lengths
from axonn_tune.specs.workload import Workload

LLAMA = {"gpus": 32, "machine": "dgx-h100", "framework": "megatron-core", "tp": 4, "pp": 4, "chunks": 5}
LLAMA |= {"context": 1, "batch": 32, "seq": 4096, "precision": "fp8-current", "micro_batch": 1, "recompute": "none"}


def test_two_numbers_state_a_log_normal_distribution() -> None:
    """Its quantiles have the mean and the 90th percentile that were asked for; a cut changes what is longer."""
    values = np.array(read_lengths("400:800", None).values(10**9))
    assert values.mean() == pytest.approx(400, rel=0.01)
    assert np.quantile(values, 0.9) == pytest.approx(800, rel=0.01)
    assert max(read_lengths("400:800", None).values(512)) == 512


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sqad", "did you mean 'squad'"),
        ("100:900", "nearest valid: 100:227"),
        ("0:4", "nearest valid: 1:1"),
        ("100:50", "nearest valid: 100:100"),
    ],
)
def test_odd_lengths_are_refused(text: str, said: str) -> None:
    """With the value, what is known or the range, and the nearest valid one."""
    with pytest.raises(UsageError, match=rf"--lengths {text}.*{said}"):
        read_lengths(text, None)


def test_files_of_lengths(tmp_path) -> None:  # noqa: ANN001 - a path
    """One a line, and a JSON list, are the same; what is no length is named with its line."""
    lines, listed, odd = (tmp_path / name for name in ("a.txt", "a.json", "odd.txt"))
    lines.write_text("100\n\n300\n200\n")
    listed.write_text("[100, 300, 200]")
    odd.write_text("100\n-3\n")
    one, other = (read_lengths(str(path), "padded") for path in (lines, listed))
    assert one.quantiles == other.quantiles
    assert (one.mean, one.longest, one.sequences) == (200.0, 300, 3)
    with pytest.raises(UsageError, match=r"odd.txt:2: '-3' is not a whole number of tokens"):
        read_lengths(str(odd), None)


def test_first_fit_fills_packs_as_published() -> None:
    """21.55 sequences of Tulu 3 in packs of 8,192 tokens that are 99.73% full; long ones leave more."""
    one = micro_batch(read_lengths("tulu", None), 8192, 1, 1)
    assert one.own / 8192 == pytest.approx(0.9973, abs=0.005)
    number = sum(count for _, count in sequences_of(_workload(read_lengths("tulu", None), seq=8192, batch=1)))
    assert number == pytest.approx(21.55, rel=0.03)
    # Two of 600 do not fit into 1,000, and leave 400.
    assert micro_batch(_same(600), 1000, 1, 1).own == 600


def test_attention_of_packs_is_that_of_their_sequences() -> None:
    """Four of 256 in a pack of 1,024 have a quarter of its pairs; a window counts in each sequence."""
    symbols = length_symbols(_workload(_same(256), seq=1024), _axes(), {"seen": lambda one: one, "w": _window}, STEP)
    assert symbols == pytest.approx({"S": 1024, "longest": 1024, "seen": 256, "w": _window(256)})


def test_padded_batches_have_the_longest_of_each() -> None:
    """Of 100 and 300, each as often, m are padded to 300 but where all are 100."""
    of_two = _lengths(100, 300, packing="padded")
    for size in (1, 2, 4):
        expected = 300 - 200 * 0.5**size
        assert micro_batch(of_two, 4096, size, 1).tokens == pytest.approx(expected, rel=0.01)
        assert batched_tokens(_workload(of_two, batch=8), size, 1) == pytest.approx(8 * expected, rel=0.01)
    assert own_tokens(_workload(of_two, batch=8)) == 8 * 200
    assert micro_batch(of_two, 4096, 4, 1).most == 300


def test_flattened_batches_have_no_pads_and_pairs_of_each() -> None:
    """Tokens on average, pairs of 100² and 300², and at the peak of memory the longest among others."""
    one = micro_batch(_lengths(100, 300, packing="padding-free"), 4096, 2, 1)
    assert (one.tokens, one.own, one.pairs(float)[0]) == (200, 200, (100**2 + 300**2) / 2)
    assert one.most == (300 + 200) / 2


def test_the_step_waits_for_the_rank_with_most() -> None:
    """By the expected largest of as many normal draws, of one micro-batch where weights are gathered, else of all."""
    of_two = _lengths(100, 300, packing="padding-free")
    deviation = micro_batch(of_two, 4096, 1, 1).deviation
    assert deviation == pytest.approx(0.5)
    draws = np.random.default_rng(0).normal(size=(20_000, 8)).max(axis=1).mean()
    for axes, batches in (({"data": 8.0}, 4), ({"z": 8.0}, 1)):
        tokens = length_symbols(_workload(of_two, batch=32), _axes(**axes), {"seen": float}, STEP)["S"]
        assert tokens == pytest.approx(200 * (1 + draws * deviation / math.sqrt(batches)), rel=0.01)
    assert length_symbols(_workload(of_two), _axes(), {"seen": float}, STEP)["S"] == 200


def test_the_wait_differs_from_step_to_step() -> None:
    """As much as the largest of as many normal draws does, and less of more micro-batches; intervals hold it."""
    of_two = _lengths(100, 300, packing="padding-free")
    draws = np.random.default_rng(0).normal(size=(20_000, 8)).max(axis=1).std()
    tokens, pairs = step_spread(_workload(of_two, batch=32), 1, 8, 1)
    assert tokens == pytest.approx(0.5 * draws / 2, rel=0.05)
    assert pairs == pytest.approx(0.8 * draws / 2, rel=0.05)
    job = {"gpus": 8, "machine": "dgx-h100", "framework": "fsdp", "batch": 64, "seq": 4096, "micro_batch": 1}
    alike, apart = (explain("llama3-8b", **job, lengths=text, packing="padding-free") for text in ("379:379", "tulu"))
    assert apart.priced.half_width > 1.1 * alike.priced.half_width


def test_columns_have_the_same_symbols_as_single_layouts() -> None:
    """To the last bit, for all combinations of axes."""
    workload = _workload(read_lengths("tulu", "padded"), batch=64)
    rows = [_axes(**{one: 4.0, other: 2.0}) for one, other in combinations(("b", "x", "z", "data", "context"), 2)]
    columns = {axis: np.array([row[axis] for row in rows]) for axis in rows[0]}
    together = length_symbols(workload, columns, {"seen": float}, STEP)
    for place, row in enumerate(rows):
        alone = length_symbols(workload, row, {"seen": float}, STEP)
        assert {name: value[place] for name, value in together.items()} == alone


def test_sequences_are_padded_for_context_and_sequence_parallelism() -> None:
    """To the least common multiple of two chunks a rank of context, and context times x under sequence parallelism."""
    plain, split = StepOptions(), StepOptions(sequence_parallel=True)
    assert [padding(4, 1, one) for one in (plain, split)] == [1, 4]
    assert [padding(3, 2, one) for one in (plain, split)] == [4, 12]


def test_a_packed_step_saves_attention_alone() -> None:
    """Of Llama-3 70B on SQuAD: time of attention falls with ΣL², other computation stays; throughput and MFU leave pads
    out; memory stays."""
    plain, packed = (explain("llama3-70b", **LLAMA, **more) for more in ({}, {"lengths": "squad"}))
    of_plain, of_packed = (one.priced.computed_s for one in (plain, packed))
    share = {kind: of_packed[kind] / of_plain[kind] for kind in of_plain}
    assert {kind for kind, part in share.items() if part != pytest.approx(1.0)} == {"attention"}
    assert 0.05 < share["attention"] < 0.4
    assert packed.priced.memory_bytes == plain.priced.memory_bytes
    assert dict(gap_to_peak(packed.priced))["useful FLOPs at peak (MFU)"] == pytest.approx(
        packed.priced.mfu * packed.priced.iteration_s
    )
    tokens = packed.priced.tokens_per_s / packed.priced.batched_tokens_per_s
    assert 0.98 < tokens < 1.0
    assert packed.priced.batched_tokens_per_s == pytest.approx(32 * 4096 / packed.priced.iteration_s)


def test_padded_batches_hold_the_longest() -> None:
    """Memory of a padded micro-batch is that of sequences of the longest, its step that of shorter ones."""
    found = [
        search("llama3-8b", 8, framework="fsdp", machine="dgx-h100", batch=64, seq=4096, micro_batch=2, **more).best
        for more in ({}, {"lengths": "tulu", "packing": "padded"})
    ]
    assert found[1].iteration_s < 0.6 * found[0].iteration_s
    assert found[1].memory_bytes == pytest.approx(found[0].memory_bytes, rel=0.01)


STEP = StepOptions()


def _window(length: float) -> float:
    return min(100.0, length)


def _axes(**sizes: float) -> dict[str, float]:
    return dict.fromkeys((*ALL_AXES, "b"), 1.0) | sizes


def _same(length: int) -> Lengths:
    return _lengths(length, packing="packed")


def _lengths(*of: int, packing: str) -> Lengths:
    return read_lengths(of, packing)  # type: ignore[arg-type]


def _workload(lengths: Lengths, *, seq: int = 4096, batch: int = 4) -> Workload:
    return Workload(global_batch=batch, sequence_length=seq, lengths=lengths)


def test_scripts_of_ones_own_make_the_batches() -> None:
    """They say which, and recipes that fine-tune take the data set; programs that train on sequences of one length are
    refused by name."""
    options = {"machine": "dgx-h100", "batch": 64, "seq": 4096, "lengths": "tulu", "micro_batch": 1, "top": 1}
    own, recipe, other = (
        search("llama3-8b", 8, framework=name, **options) for name in ("fsdp", "megatron-core", "torchtitan")
    )
    command = command_of(own.best.detail)
    assert "It makes packs of its data set (tulu: mean 379, p90 830, packed)." in command.needs
    written = " ".join(command_of(recipe.best.detail).words)
    assert "--dataset tulu3" in written
    assert "dataset.enable_offline_packing=true" in written
    with pytest.raises(UsageError, match=r"torchtitan\.train trains on sequences of one length"):
        command_of(other.best.detail)


@pytest.mark.parametrize(
    ("said", "framework", "packing"),
    [
        (["neat_packing"], "deepspeed", "packed"),
        (["padding_free"], "fsdp", "padding-free"),
        ([], "fsdp", "padded"),
        ([], "megatron-core", "packed"),
    ],
)
def test_files_say_how_they_batch(said: list[str], framework: str, packing: str) -> None:
    """Trainers pad what they neither pack nor flatten; Megatron-Core's fine-tuning packs."""
    stated = {name: Stated("true", 1) for name in said}
    assert stated_packing(stated, find_framework(framework)) == packing


@pytest.mark.parametrize(("framework", "packing"), [("fsdp", "padded"), ("megatron-core", "padding-free")])
def test_rows_of_a_search_are_priced_alone_to_the_bit(framework: str, packing: str) -> None:
    """Columns have tokens of a sequence by micro-batch and ranks; memory has the longest."""
    options = {"machine": "dgx-h100", "batch": 32, "seq": 4096, "lengths": "tulu", "packing": packing, "top": 3}
    for row in search("llama3-8b", 8, framework=framework, **options):
        alone = price(row.job, row.layout)
        assert (alone.iteration_s, alone.memory_bytes) == (row.iteration_s, row.memory_bytes)


def test_presets_are_documents() -> None:
    """Each is a distribution."""
    for name in PRESETS:
        assert read_lengths(name, None).data == name
