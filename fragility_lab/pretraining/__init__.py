"""How the embedded checkpoint and its texts were made, and how to make them again."""
