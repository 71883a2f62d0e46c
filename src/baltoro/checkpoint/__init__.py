"""Checkpoints from and to the official layout: K3's and Kimi Linear's."""
