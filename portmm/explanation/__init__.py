"""Explanations of selected schedules and their predictions."""
