"""Explanations of an error: errors that act together, drawn errors, changed choices, and a signal by token."""
