"""Sandboxes over HTTP as E2B's clients speak it: `baltoro.sandbox.e2b.server` has the entry."""
