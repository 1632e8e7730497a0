"""The proving ground (X3): engines whose truth is known."""
