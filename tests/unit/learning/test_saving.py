"""Saves, loads and restarts of training logs: lines of each tool, what a profile learns of its site, their cost."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from axonn_tune.cost.economics import checkpoint_bytes
from axonn_tune.learning.operation import saving_cost, with_operation
from axonn_tune.learning.reading import EvidenceRequest, read_evidence
from axonn_tune.learning.saving import Save, SavingLog

STEP = (
    " [{}] iteration {:8d}/    2000 | consumed samples: {:12d} | elapsed time per iteration (ms): 8000.0 | "
    "throughput per GPU (TFLOP/s/GPU): 400.0 | global batch size:   512 | lm loss: 2.0E+00 |"
)
BEGAN = (
    "using world size: 64, data-parallel size: 32, context-parallel size: 1, tensor-model-parallel size: 2, "
    "pipeline-model-parallel size: 1"
)
TIMER = "    {}-checkpoint ................................: (24895.07, 24895.13)"
AT = "2026-03-01 10:00:00"


@pytest.mark.parametrize(
    ("lines", "save"),
    [
        pytest.param([TIMER.format("save")], Save(7, 24.89513, False, 24.89513), id="Megatron"),
        pytest.param(
            ["  saved checkpoint [ t 1/1 ] (min, max) time across ranks (ms): " + TIMER.format("save").strip()],
            Save(7, 24.89513, False, 24.89513),
            id="one line",
        ),
        pytest.param(
            ["    save-checkpoint ................................: 900.50"],
            Save(7, 0.9005, False, 0.9005),
            id="maximum",
        ),
        pytest.param(
            [
                "  scheduled an async checkpoint save at iteration       7 to /ckpt",
                TIMER.format("save"),
                "  [2026-03-01 10:02:00.000000] successfully saved checkpoint from iteration       7 to /ckpt",
            ],
            Save(7, 24.89513, True, 120.0),
            id="asynchronous",
        ),
        pytest.param(
            ["root - INFO - Finished saving the checkpoint in 3.25 seconds."], Save(7, 3.25, False, 3.25), id="titan"
        ),
        pytest.param(
            ["Finished saving the checkpoint (or staging if async is enabled)in 3.25 seconds."],
            Save(7, 3.25, False, 3.25),
            id="titan of 2025",
        ),
        pytest.param(["Finished staging the checkpoint in 3.25 seconds."], Save(7, 3.25, True, None), id="staging"),
    ],
)
def test_lines_of_each_tool_say_what_a_save_took(lines: list[str], save: Save) -> None:
    """Guards times of a save, whether training waited for storage or for a copy, and when it was written."""
    log = SavingLog()
    log.line(f"[{AT}.000000] iteration        7/ 2000 |", 7)
    for line in lines:
        log.line(line, None)
    found = log.found(8.0, before=None)
    assert found is not None
    (only,) = found.saves
    assert only._replace(stall_s=round(only.stall_s, 6), write_s=only.write_s and round(only.write_s, 6)) == save


def test_a_bar_of_the_trainer_has_the_seconds_of_a_save() -> None:
    """Guards Hugging Face's: what its bar counted beyond the step; not over an evaluation."""
    log = SavingLog()
    for line in (
        " 10%|# | 10/100 [01:40<15:00, 10.00s/it]",
        "[INFO|trainer.py:4309] 2026-03-01 10:00:00,079 >> Saving model checkpoint to out/checkpoint-10",
        " 11%|# | 11/100 [02:20<15:00, 10.00s/it]",
        " 12%|# | 12/100 [02:30<15:00, 10.00s/it]",
        ">> Saving model checkpoint to out/checkpoint-12",
        "***** Running Evaluation *****",
        " 13%|# | 13/100 [09:30<15:00, 10.00s/it]",
    ):
        log.line(line, None)
    found = log.found(10.0, before=None)
    assert found is not None
    assert found.saves == (Save(10, 30.0, False, 30.0),)
    assert (found.first, found.steps) == (1, 13)


def written(folder: Path, *, restart_s: float) -> Path:
    """A log of 20 steps of 8 s that saves for 20 s after each ten, fails after 25 and starts again from 20."""
    clock, lines = datetime.fromisoformat(AT), [BEGAN]

    def steps(first: int, last: int) -> None:
        nonlocal clock
        for step in range(first, last + 1):
            clock += timedelta(seconds=8)
            lines.append(STEP.format(f"{clock}.000000", step, step * 512))
            if step % 10 == 0:
                clock += timedelta(seconds=20)
                lines.append("    save-checkpoint ................................: (19990.00, 20000.00)")

    steps(1, 25)
    clock += timedelta(seconds=restart_s + 30.0)
    lines += [BEGAN, "    load-checkpoint ................................: (29990.00, 30000.00)"]
    steps(21, 40)
    path = folder / "train.log"
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return path


def test_a_profile_learns_its_storage_and_restarts_and_saves_have_their_cost(tmp_path: Path) -> None:
    """Guards bytes of the program over seconds of the log, minutes between two runs of it, and the best interval."""
    path = written(tmp_path, restart_s=720.0)
    request = EvidenceRequest(
        paths=[path], machine="dgx-h100", model="llama3-8b", facts={"seq": 8192, "recompute": "none"}
    )
    evidence = read_evidence(request)
    first, second = (sample.narrowed(lambda same: same) for sample in evidence.samples)
    site = with_operation(evidence.machine, evidence.samples).operation
    assert first.setup is not None
    saved = checkpoint_bytes(first.setup.priced)
    assert saved == 14 * 8_030_261_248
    assert site.storage_gb_per_s == pytest.approx(saved / 1e9 / 20.0, rel=1e-3)
    assert site.restart_minutes == pytest.approx(12.0)
    assert site.host_copy_gb_per_s is None
    assert site.sources["restart_minutes"].source == "1 restart with 64 GPUs in train.log:31"
    cost, again = saving_cost(first, evidence.machine), saving_cost(second, evidence.machine)
    assert cost is not None
    assert again is not None
    assert (cost.saves, cost.interval_steps, cost.stall_s, cost.restart_s) == (2, 10, 20.0, None)
    assert cost.share == pytest.approx(40.0 / 240.0)
    assert again.restart_s == pytest.approx(720.0)
    assert (again.load_s, again.repeated_steps) == (30.0, 5)
    # Young's interval is near the best; every ten steps, a fifth of the time is that of saving.
    assert cost.best_steps * 8.0 == pytest.approx(math.sqrt(2.0 * 20.0 * cost.failure_s), rel=0.02)
    assert cost.least_lost < 0.01 < 0.2 < cost.lost
