"""Predictions against published measurements: steps, collectives, matrix products, memory."""
