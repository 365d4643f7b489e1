"""Schedules that were measured to be fastest: one TOML file per chip, as `portmm tuned --export` writes them."""
