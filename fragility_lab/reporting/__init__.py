"""What is shown of results: tables, figures, claims with their verdicts, and pages."""
