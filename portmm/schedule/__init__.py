"""Schedules: candidates, legality and the cost model."""
