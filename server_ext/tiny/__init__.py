"""Makes tiny target and draft models on the spot, for tests, development and demonstration."""
