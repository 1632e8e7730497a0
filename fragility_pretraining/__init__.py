"""The making of the embedded checkpoint and its texts, and the programs that make them again."""
