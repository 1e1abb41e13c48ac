"""Manifests of Kubernetes that start training."""

from __future__ import annotations

from pathlib import Path

import pytest

from axonn_tune.errors import UsageError
from axonn_tune.learning.run import CommandRun
from axonn_tune.learning.stated import read_run

HEAD = "# a job\napiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: data}\n---\n"
JOB = """apiVersion: kubeflow.org/v1
kind: PyTorchJob
spec:
  pytorchReplicaSpecs:
    Worker:
      replicas: 4
      template:
        spec:
          containers:
            - name: pytorch
              image: train:1
              resources: {limits: {nvidia.com/gpu: 8}}
              env: [{name: MBS, value: "2"}, {name: TOKEN, valueFrom: {secretKeyRef: {name: a, key: b}}}]
"""
ARGUMENTS = (
    *("--num-layers 32", "--hidden-size 4096", "--num-attention-heads 32", "--seq-length 4096", "--bf16"),
    *("--max-position-embeddings 4096", "--micro-batch-size $MBS", "--global-batch-size 256", "--vocab-size 32000"),
    "--tensor-model-parallel-size 2",
)
SCRIPT = "".join(f"                    {one} \\\n" for one in ARGUMENTS)
WORDS = "".join(f"                - {word}\n" for one in ARGUMENTS for word in one.split())


def run_of(text: str, folder: Path) -> CommandRun:
    """The run of a manifest."""
    (folder / "job.yaml").write_text(text, "utf-8")
    return read_run(folder / "job.yaml", given={})


@pytest.mark.parametrize(
    "command",
    [
        f"              command: [bash, -lc]\n              args:\n                - |\n                  set -e\n"
        f"                  torchrun --nnodes $NODES pretrain_gpt.py \\\n{SCRIPT}",
        f"              command:\n                - torchrun\n                - pretrain_gpt.py\n{WORDS}",
    ],
)
def test_the_command_of_a_container_is_read_with_its_pods_and_gpus(command: str, tmp_path: Path) -> None:
    """Guards scripts and lists of words, values of the environment, several documents, and lines of the manifest."""
    run = run_of(HEAD + JOB + command, tmp_path)
    told = {name: run.columns[name].value for name in ("n_gpus", "tp", "mbs", "gbs", "layers")}
    assert (run.software, told) == ("megatron-core", {"n_gpus": 32, "tp": 2, "mbs": 2, "gbs": 256, "layers": 32})
    assert run.unknown == ()
    lines = (tmp_path / "job.yaml").read_text("utf-8").splitlines()
    assert "--tensor-model-parallel-size" in lines[run.columns["tp"].line - 1] + lines[run.columns["tp"].line - 2]


JOBS = """apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
spec:
  replicatedJobs:
    - name: workers
      replicas: 2
      template:
        spec:
          parallelism: 4
          template: {spec: {containers: [{resources: {limits: {nvidia.com/gpu: 8}}, command: [COMMAND]}]}}
"""
LAUNCHED = """apiVersion: kubeflow.org/v2beta1
kind: MPIJob
spec:
  mpiReplicaSpecs:
    Launcher: {replicas: 1, template: {spec: {containers: [{command: [COMMAND]}]}}}
    Worker: {replicas: 8, template: {spec: {containers: [{resources: {limits: {nvidia.com/gpu: 8}}}]}}}
"""


@pytest.mark.parametrize("manifest", [JOBS, LAUNCHED])
def test_nodes_are_the_pods_that_have_gpus(manifest: str, tmp_path: Path) -> None:
    """Guards jobs of several pods each, whose numbers are multiplied, and a launcher without GPUs, which is no node."""
    words = " ".join(ARGUMENTS).replace("$MBS", "2")
    run = run_of(manifest.replace("COMMAND", f'bash, -c, "mpirun python pretrain_gpt.py {words}"'), tmp_path)
    assert run.columns["n_gpus"].value == 64


def test_a_manifest_of_ones_own_program_says_what_was_found(tmp_path: Path) -> None:
    """Guards the command that is offered where a program is no tool's."""
    command = "              command: [torchrun, /own/train.py, --num_layers=16, --hidden_size=2048, --num_heads=16]\n"
    with pytest.raises(UsageError) as caught:
        run_of(JOB + command, tmp_path)
    assert "found: model of 16 layers, hidden 2,048, 32 GPUs" in str(caught.value)
    assert "--gpus 32 --model llama3-8b --set model.kv_heads=16" in str(caught.value)
