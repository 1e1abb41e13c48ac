"""Predict the step time of AxoNN's 4D parallel training on every grid, and launch the best one."""

__version__ = "0.1.0"
