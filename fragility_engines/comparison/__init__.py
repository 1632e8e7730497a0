"""The comparison of an engine's log with a model: prediction, slopes along suspects, verdict, page."""
