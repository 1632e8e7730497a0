"""Explanations of an error: errors that act together, drawn errors, and changed choices."""
