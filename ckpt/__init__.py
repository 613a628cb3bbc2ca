"""Save, load, verify and reshard checkpoints. Names load lazily: torch is imported on use."""
