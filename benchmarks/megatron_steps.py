"""Published step times of Megatron-LM, and what the baseline predicts for them: `python -m benchmarks.megatron_steps`.

Nothing is fitted to these rows. The two papers differ in what their software hides, which
`axonn_tune.baselines.layout` states.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass

from axonn_tune.baselines.layout import KORTHIKANTI_2022, NARAYANAN_2021, Layout, broken_constraints
from axonn_tune.baselines.megatron import MegatronPrice, MegatronPricer
from axonn_tune.report.output import Heading, markdown_table
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.model import Model, ModelDefaults
from axonn_tune.specs.workload import RECOMPUTES, Workload
from tools.fit.rows import PUBLISHED

MACHINE = "dgx-a100"
SOFTWARE = {"narayanan2021": NARAYANAN_2021, "korthikanti2022": KORTHIKANTI_2022}


@dataclass(frozen=True)
class StepRow:
    """One measured training step."""

    source: str
    model: Model
    workload: Workload
    layout: Layout
    time_s: float

    @property
    def refused_because(self) -> list[str]:
        """Constraints of Megatron-LM that the row breaks: none, or it was copied wrongly."""
        return broken_constraints(self.layout, self.model, self.workload)


def step_rows() -> list[StepRow]:
    """All rows."""
    with (PUBLISHED / "megatron_steps.csv").open(encoding="utf-8", newline="") as file:
        return [_step_row(line) for line in csv.DictReader(file)]


def _step_row(line: dict[str, str]) -> StepRow:
    sizes = {name: int(value) for name, value in line.items() if value.isdigit()}
    layout = Layout(
        tensor=sizes["tensor"],
        pipeline=sizes["pipeline"],
        data=sizes["data"],
        micro_batch=sizes["micro_batch"],
        interleave=sizes["interleave"],
        recompute=next(kind for kind in RECOMPUTES if kind == line["recompute"]),
        sequence_parallel=bool(sizes["sequence_parallel"]),
    )
    workload = Workload(global_batch=sizes["global_batch"], sequence_length=sizes["sequence_length"], precision="fp16")
    return StepRow(line["source"], _gpt(line["model"], line["source"], sizes), workload, layout, float(line["step_s"]))


def _gpt(name: str, source: str, sizes: dict[str, int]) -> Model:
    """A GPT as both papers train it: MLP of 4 times hidden, learned positions, one table."""
    return Model(
        schema="axonn-tune/model/1",
        name=name,
        family="gpt",
        layers=sizes["layers"],
        hidden=sizes["hidden"],
        heads=sizes["heads"],
        kv_heads=sizes["heads"],
        head_dim=sizes["hidden"] // sizes["heads"],
        ffn=4 * sizes["hidden"],
        vocab=sizes["vocab"],
        max_sequence_length=sizes["sequence_length"],
        biases=True,
        tied_embeddings=True,
        source=source,
        defaults=ModelDefaults(global_batch=sizes["global_batch"], sequence_length=sizes["sequence_length"]),
    )


def predict(row: StepRow) -> MegatronPrice:
    """Price a row on a DGX A100."""
    machine = load_machine(MACHINE).document
    pricer = MegatronPricer(row.model, machine, row.workload, gpus=row.layout.gpus, software=SOFTWARE[row.source])
    return pricer.price(row.layout)


def main() -> None:
    """Print measured and predicted times."""
    headings = [
        Heading(title, left=title in {"source", "model", "layout", "recompute"})
        for title in ("source", "model", "GPUs", "layout", "recompute", "measured, s", "predicted, s", "error")
    ]
    cells, errors = [], []
    for row in step_rows():
        predicted_s, layout = predict(row).iteration_s, row.layout
        errors.append(predicted_s / row.time_s - 1.0)
        shown = [row.source, row.model.name, str(layout.gpus), layout.words(), layout.recompute]
        cells.append([*shown, f"{row.time_s:.2f}", f"{predicted_s:.2f}", f"{errors[-1]:+.1%}"])
    print(markdown_table(headings, cells))
    print(f"mean of absolute errors {sum(map(abs, errors)) / len(errors):.1%}, worst {max(map(abs, errors)):.1%}")


if __name__ == "__main__":
    main()
