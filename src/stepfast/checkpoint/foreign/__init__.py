"""Checkpoints that others wrote, read as data: no torch, and nothing of theirs is ever executed."""
