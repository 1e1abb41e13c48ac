"""What validation runs beside the launch configs that it is given."""

from pathlib import Path

from axonn_tune.cli.main import main
from axonn_tune.validation.runner import plan_from_files

_ZERO_BUBBLE = (
    "--gpus 8 --model nano-16 --batch 32 --machine perlmutter --pipeline 4 --pipeline-schedule zb1p --z 2 --x 1 --y 1"
)


def test_one_rank_has_no_order_of_stages(tmp_path: Path) -> None:
    """Losses of split backward passes are compared with a run of one rank, which is a launch config of its own."""
    path = tmp_path / "zb1p.yaml"
    assert main([*_ZERO_BUBBLE.split(), "--data", "1", "-q", "-o", str(path)]) == 0
    plan = plan_from_files([str(path)], machine=None, command="axonn-tune validate zb1p.yaml")
    (launch,), alone = plan.launches, plan.on_one_rank()
    assert (launch.pipeline_order, launch.grid.pipeline) == ("zb1p", 4)
    assert (alone.pipeline_order, alone.grid.world) == ("1f1b", 1)
    assert alone.micro_batch * alone.grad_accumulation == 32
