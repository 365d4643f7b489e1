"""The host: detection of its features, measured rates, load of other processes."""
