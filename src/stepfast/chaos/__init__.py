"""Prove: faults injected on purpose."""
