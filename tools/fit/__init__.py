"""Fits the numbers that ship with the tool to published measurements."""
