"""The functions of `axonn_tune`, for Python programs, notebooks and the command line."""
