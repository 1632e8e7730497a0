"""A plugin of pytest that is imported before all others: ``make test`` gives ``-p tests.quick_start``.

The plugin nbval imports nbformat in every process of pytest. ``fragility_lab.running`` leaves out most of that.
"""

import fragility_lab.running  # noqa: F401
