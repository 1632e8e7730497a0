"""What is shown of the results: tables, figures, claims with their verdicts, and pages."""
