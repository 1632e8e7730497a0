"""The calibrated predictor: expected forward error of a low-precision pass, from one forward and one backward.

Every rounding of the pass is an independent error e_i of a value y_i. To first order the final error is
sum_i (dX/dy_i) e_i, so that

    E ||E_L||^2 = sum_i ||dX/dy_i||^2 E e_i^2,

and for a random sign vector v the square of d(v.X)/dy_i estimates ||dX/dy_i||^2 without bias: one
backward pass gives the contribution c^2 of every kernel and weight, and the mismatch is predicted as
sqrt(sum c^2) / ||X||. This is the unified theorem (Theorem unified) with the adjoint in place of
products of norms; compare Higham & Mary 2019 (doi:10.1137/18M1226312) on rounding errors as random
variables and Menon et al. 2018 (doi:10.1109/SC.2018.00051) on adjoints for tuning precision.
"""

from fragility_core.adjoint.estimator import Adjoint, Prediction, final_hidden, predict

__all__ = ["Adjoint", "Prediction", "final_hidden", "predict"]
