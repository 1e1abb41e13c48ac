"""What Python programs and notebooks call, and what the command line prints: the functions of `axonn_tune`."""
