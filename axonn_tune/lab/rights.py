"""Whether a lab could come up here: `python -m axonn_tune.lab.rights` tries, and says what is missing.

It ends with 0 as root or the like, with 3 if a user namespace is needed and may be made, else with 5.
"""

from __future__ import annotations

import sys

from axonn_tune.errors import EnvironmentProblem
from axonn_tune.lab.namespaces import Kind, separate
from axonn_tune.lab.network import require_tools

UNPRIVILEGED = 3


def main() -> int:
    """Try what bringing up a lab begins with; this process ends, and with it what it has made."""
    try:
        require_tools()
        return UNPRIVILEGED if separate(Kind.NETWORK | Kind.PID) else 0
    except (OSError, EnvironmentProblem) as error:
        sys.stderr.write(f"{error}\n")
        return EnvironmentProblem.exit_code


if __name__ == "__main__":
    sys.exit(main())
