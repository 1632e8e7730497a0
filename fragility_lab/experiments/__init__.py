"""The paper's experiments and this project's own: each makes tidy tables from its specification alone."""
