"""Plans as data, and in the forms that other libraries read. No library is imported."""
