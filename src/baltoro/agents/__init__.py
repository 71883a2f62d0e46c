"""Agents: tasks, harnesses, policies, rollouts, their records and how they are judged. No torch."""
