"""Constants of the cost models: one TOML file for CPUs and one for devices, each number with where it was measured."""
