"""The presentation of results: tables, figures, claims with their verdicts, and pages."""
