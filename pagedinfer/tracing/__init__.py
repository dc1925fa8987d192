"""What a scheduler did, step by step, in a file: written, read, explained, and run again otherwise."""
