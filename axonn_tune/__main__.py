"""`python -m axonn_tune`: the command line where the console script is not on the path."""

import sys

from axonn_tune.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
