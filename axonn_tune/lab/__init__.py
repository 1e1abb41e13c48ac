"""An emulated cluster of nodes on one Linux host."""
