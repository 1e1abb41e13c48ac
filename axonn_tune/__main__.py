"""`python -m axonn_tune`: the command line where the console script is not on the path."""

from axonn_tune.cli.main import main

if __name__ == "__main__":
    main()
