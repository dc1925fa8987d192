"""Trials that take minutes: `python -m tests.server.trials.NAME`. Their short forms are among the tests."""
