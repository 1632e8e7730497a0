"""The paper's statements as pure functions. Each docstring gives the number and the LaTeX label of its statement.

``docs/paper_to_code.md`` lists every statement with its function, test and notebook.

Magnitudes combine elementwise: their arguments may be floats, NumPy arrays, torch tensors or pandas columns.
Functions of vectors and matrices take torch tensors and compute in fp64. The paper's epsilon_mach is the unit
roundoff u (``formats.Format.unit_roundoff``); epsilon is LayerNorm's. A function named ``*_bound`` returns the
larger side of the paper's inequality, to first order in u unless its docstring says otherwise.

The error model behind every bound (Section 4.1 (`subsec:setup`)): inputs are given exactly, and fl(a o b) =
(a o b)(1 + delta) with |delta| <= u, with neither overflow nor underflow. The constants of the kernels (c_gemm,
c'_gemm = ``c_gemm_out``, c_smx = ``c_softmax``, a_ln) depend on the machine.
``fragility_lessons.constants`` measures them.

Some statements do not hold as printed or need a reading. The docstrings of these functions say what holds instead, and
``tests/core/test_theory_readings.py`` has a counterexample for each: ``kappa_softmax``, ``gemm_error_bound``,
``softmax_error_bound``, ``attention_error_bound``, ``downstream_transport``, ``layernorm_error_bound``,
``layernorm_relative_error_bound``, ``layernorm_ratio``, ``layernorm_surrogate``, ``mismatch_bound``,
``epsilon_update``, ``post_update_ratio_bound``, ``dropout_gain_bound`` and ``dropout_kappa_softmax``.
"""

# ruff: noqa: F403, I001 (each module's __all__ names its statements; the modules stand in the paper's order)
from fragility_core.theory.attention import *
from fragility_core.theory.residual import *
from fragility_core.theory.layernorm import *
from fragility_core.theory.unified import *
from fragility_core.theory.stabilization import *
from fragility_core.theory.dropout import *
from fragility_core.theory.forced_budget import *
