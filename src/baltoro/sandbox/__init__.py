"""Run untrusted programs in machines that pause, snapshot, resume and fork."""
