"""Load on a server, and what it says about it."""
