"""Checks of the tool against the world: fits of machine profiles, accuracy, speed."""
