"""Explanations of an error: errors that act together, drawn errors, and the choices that errors change."""
