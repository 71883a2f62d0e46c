"""Optimisation: Muon per head, AdamW, schedules, weight clip, router balancing."""
