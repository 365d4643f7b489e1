"""Facts about machines: isa/*.toml, chip/*.toml, clouds.toml."""
