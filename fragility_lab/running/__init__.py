"""The programs behind the make targets: environment, execution of notebooks, benchmarks, JupyterLab."""

import sys

# nbformat imports jsonschema, which would compile a grammar of IRIs: most of the time that nbformat takes to import.
# No schema of notebooks asks for IRIs.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  # its import now raises ImportError
