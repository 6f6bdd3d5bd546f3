"""Decide: pure state machines and policies; no clock, no I/O, no torch."""
