"""The REST routes under `/v1`: parse, ask the registry, answer. No rules of their own."""
