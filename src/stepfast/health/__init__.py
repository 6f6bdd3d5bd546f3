"""Checks of a machine: healthy, unhealthy or unknown, with evidence."""
