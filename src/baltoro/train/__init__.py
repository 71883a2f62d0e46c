"""One step, one loop: pretraining, and what else is trained on packed batches."""
