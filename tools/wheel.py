"""A built wheel: what has to be in it, what must not, and whether it works alone.

    python -m tools.wheel dist/axonn_tune-*.whl

`make wheel` builds it first. The wheel is installed with its requirements alone into an empty environment, where the
main job and `doctor` have to end well without torch.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "axonn_tune": "axonn_tune",
    "configs": "axonn_tune/shipped_configs",
    "machines": "axonn_tune/shipped_machines",
}
"""Folders of the checkout that are shipped, and where in the wheel each is."""
LARGEST_BYTES = 2_000_000
"""Of the wheel; it had 1.4 MB when this was set."""
LARGEST_FILE_BYTES = 600_000
"""Of one file in it, unpacked; the largest, published steps as CSV, had 521 kB."""
COMMANDS = ("axonn-tune --version", "axonn-tune --gpus 1024 --model 80b", "axonn-tune doctor")


def problems(wheel: Path) -> Iterator[str]:
    """What is wrong with the contents of a wheel of this checkout: files that lack, are too many or are too large."""
    with zipfile.ZipFile(wheel) as packed:
        sizes = {one.filename: one.file_size for one in packed.infolist()}
    wanted = {
        f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, place in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    own = {name for name in sizes if name.split("/")[0].endswith(".dist-info")}
    yield from (f"{name} lacks" for name in sorted(wanted - {*sizes}))
    yield from (f"{name} does not belong into it" for name in sorted({*sizes} - own - wanted))
    yield from (f"{name} has {size:,} bytes" for name, size in sizes.items() if size > LARGEST_FILE_BYTES)
    for name in ("METADATA", "entry_points.txt", "licenses/LICENSE"):
        if not any(one.endswith(f".dist-info/{name}") for one in own):
            yield f"{name} lacks"
    if (size := wheel.stat().st_size) > LARGEST_BYTES:
        yield f"{wheel.name} has {size:,} bytes"


def try_alone(wheel: Path) -> None:
    """Install the wheel into an empty environment, and run the main job and `doctor` there, without torch."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([ROOT / ".ci" / "make-venv", sys.executable, f"{folder}/venv"], check=True)
        python = f"{folder}/venv/bin/python"
        quiet = ("-qq", "--disable-pip-version-check")
        subprocess.run([python, "-m", "pip", *quiet, "install", wheel.resolve()], check=True)
        for line in COMMANDS:
            name, *arguments = shlex.split(line)
            click.echo(f"$ {line}")
            subprocess.run([f"{folder}/venv/bin/{name}", *arguments], cwd=folder, check=True)
        absent = "import importlib.util as util, sys; sys.exit(util.find_spec('torch') is not None)"
        subprocess.run([python, "-c", absent], check=True)


@click.command()
@click.argument("wheel", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(wheel: Path) -> None:
    """Check a wheel's contents, then whether it works in an empty environment."""
    found = list(problems(wheel))
    if found:
        raise click.ClickException("\n".join(found))
    with zipfile.ZipFile(wheel) as packed:
        count = len(packed.namelist())
    click.echo(f"{wheel.name}: {count} files, {wheel.stat().st_size:,} bytes")
    try_alone(wheel)


if __name__ == "__main__":
    main()
