"""Tracked objects as local tensors and plain values, and back: `tree` is the way in."""
