"""How it is computed: candidates, legality, and the cost model."""
