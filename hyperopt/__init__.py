"""Muon and AdamW whose state lives on owner replicas. Names load lazily."""
