"""Several processes: plans that are applied to a model from outside."""
