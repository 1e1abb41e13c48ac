"""Fits of shipped numbers: machine profiles to collectives and GEMMs, software to published steps."""
