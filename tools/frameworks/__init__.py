"""What frameworks' own code says to the commands written for them: environments, one check script each, recordings."""
