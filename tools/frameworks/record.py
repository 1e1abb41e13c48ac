"""Record what frameworks' own code says to the commands written for them, in environments of their own.

python -m tools.frameworks.record             # every framework: install what is missing, check, record
python -m tools.frameworks.record torchtitan  # one of them

A framework whose environment cannot be installed is skipped, with the reason. What is recorded is compared with today's
commands by tests/unit/frameworks/test_recordings.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.unit.frameworks.asked import RECORDINGS, Asked, asked
from tools.frameworks.environments import ENVIRONMENTS, ROOT, Environment, SkippedError

SHARED = "tools.frameworks.answering"


def main(names: Sequence[str]) -> int:
    """Check and record the frameworks named, or all; 1 if one of them said otherwise than was expected."""
    unknown = set(names) - {one.name for one in ENVIRONMENTS}
    if unknown:
        print(f"no framework is called {', '.join(sorted(unknown))}: there are {_names()}", file=sys.stderr)
        return 2
    said = [_record(one) for one in ENVIRONMENTS if not names or one.name in names]
    return 0 if all(said) else 1


def _names() -> str:
    return ", ".join(one.name for one in ENVIRONMENTS)


def _record(environment: Environment) -> bool:
    try:
        environment.install()
    except SkippedError as why:
        print(f"{environment.name}: skipped: {why}")
        return True
    requests = [one for name in environment.frameworks for one in asked(name, environment.forms)]
    answered = _answers(environment, requests)
    answers = {one["key"]: one for one in answered["answers"]}
    wrong = [one for one in requests if not one.as_expected(answers[one.key])]
    for one in wrong:
        print(f"{environment.name}: {one.key}: {answers[one.key].get('error', 'accepted')}")
    if wrong:
        return False
    path = write(environment, {"python": answered["python"], "packages": answered["packages"]}, requests, answers)
    kinds = Counter(one.kind for one in requests)
    counts = ", ".join(f"{count} {kind}s" for kind, count in kinds.items())
    packages = ", ".join(f"{name} {version}" for name, version in answered["packages"].items())
    print(f"{environment.name}: {counts}, as {packages} has them: {path.relative_to(ROOT)}")
    return True


def _answers(environment: Environment, requests: Sequence[Asked]) -> Any:
    """What the check script says, in the last line it prints."""
    variables = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **environment.variables}
    done = subprocess.run(
        [str(environment.interpreter), "-m", environment.module],
        input=json.dumps([one.request for one in requests]),
        env={name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"} | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{environment.module} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def script_hashes(environment: Environment) -> dict[str, str]:
    """SHA-256 of the check script and of what the check scripts share, by path."""
    paths = [f"{module.replace('.', '/')}.py" for module in (environment.module, SHARED)]
    return {path: hashlib.sha256((ROOT / path).read_bytes()).hexdigest() for path in paths}


def write(
    environment: Environment,
    versions: Mapping[str, object],
    requests: Sequence[Asked],
    answers: Mapping[str, Mapping[str, object]],
) -> Path:
    """Write a recording, one entry a line; one that says the same keeps its date."""
    path = RECORDINGS / f"{environment.name}.json"
    entries = [
        one.recorded | {name: value for name, value in answers[one.key].items() if name != "key"} for one in requests
    ]
    recording = {**versions, "scripts": script_hashes(environment), "entries": entries}
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        date = before.pop("recorded")
        if before == json.loads(json.dumps(recording)):
            return path
    date = datetime.now(UTC).date().isoformat()
    head = "".join(
        f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in [("recorded", date), *versions.items()]
    )
    head += f' "scripts": {json.dumps(recording["scripts"])},\n'
    lines = ",\n".join(f"  {json.dumps(one, ensure_ascii=False, separators=(',', ':'))}" for one in entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{\n{head} "entries": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
