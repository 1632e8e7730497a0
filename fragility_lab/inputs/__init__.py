"""Checkpoints and texts, by hub name or path, checked before any work."""
