"""Run one node: its zygote, its store, its ranks."""
