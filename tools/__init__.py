"""What fits the numbers that ship with the tool, and writes the pages about them. Run from the repository root."""
