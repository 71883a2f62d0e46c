"""Text to tokens and back: tokenizer, XTML chat format, images. Nothing here imports torch."""
