"""Facts: one TOML file per isa."""
