"""Facts: one TOML file per chip."""
