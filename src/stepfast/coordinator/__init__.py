"""Run one job: membership, decisions, the event log."""
