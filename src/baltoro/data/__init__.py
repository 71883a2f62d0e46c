"""From text and pictures on disk to packed batches."""
