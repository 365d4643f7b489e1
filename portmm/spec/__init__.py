"""What is computed: dtypes, problems, expressions and epilogues."""
