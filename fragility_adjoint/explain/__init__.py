"""Why errors add up as they do, and what they change: errors that act together, drawn errors, changed choices."""
