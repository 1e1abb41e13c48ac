"""Speed of the tool, its reports and its runtime; and accuracy against the world."""
