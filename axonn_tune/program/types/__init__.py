"""Layer types: one file each, which says the nodes that a block of it has."""
