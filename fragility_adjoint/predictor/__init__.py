"""The adjoint predictor: the expected forward error of a low-precision pass, from one forward and one backward pass.

Every rounding of the pass changes a value y_i by a local error e_i. The errors are taken to be independent. To first
order the error of the final hidden state X_L is E_L = sum_i (dX_L/dy_i) e_i, so that

    E||E_L||^2 = sum_i c_i^2,    c_i^2 = ||dX_L/dy_i||^2 E e_i^2.

For a random sign vector v, the square of d(v.X_L)/dy_i estimates ||dX_L/dy_i||^2 without bias. One backward pass thus
gives the contribution c_i^2 of every kernel and weight, and the predicted mismatch is sqrt(sum_i c_i^2) / ||X_L||.
This is Theorem 3 (`thm:unified`) with the adjoint in place of products of norms. Compare Higham & Mary 2019
(doi:10.1137/18M1226312) on rounding errors as random variables, and Menon et al. 2018 (doi:10.1109/SC.2018.00051) on
adjoints for tuning precision.

Local errors. The error of a kernel is known: its exact result minus the rounded one. A kernel that rounds nothing
contributes nothing. Where results stay as they were before rounding, sums and products get the error that they make of
rounded operands (``calls.FunctionCall.of_stored``): a rounded number times 1 is exact, and a large one that swallows a
tiny one loses no more than that. For weights without a reference the expected square ulp^2 / 12 takes the place of
e_i^2, and for stochastic rounding d (ulp - d), where d is the distance to the lower neighbour.

What is predicted is a target (``targets``): the final hidden state unless another is named, such as the KL divergence
of the next-token distribution.

Limits:

- The prediction is the mean over realisations of the rounding errors. The error of a single pass scatters about it.
- Errors that are alike add up to more, or less, than independent ones. This happens in a channel that has nearly the
  same large value at every position. For inputs of linear layers that a recipe rounds, errors are summed over positions
  first (``recorder.ErrorRecorder.record``); elsewhere they are taken as independent. ``coherence`` says by how much the
  errors of a pass add up to more or less, and which pairs of sites reinforce each other or cancel; with ``secant``
  slopes they add up to the measured error. The standard error does not show this, since it is the scatter of the probes
  alone. With p probes, the error of the estimate over its standard error follows a t distribution with p - 1 degrees of
  freedom.
- The first order is accurate in bf16 and fp16. For fp8 and quantization give the fp32 reference, so that gradients
  are taken at both ends. With every kernel in fp8 the prediction is too large (docs/results.md, docs/machines.md).
- A mixture of experts may choose other experts after rounding, which no derivative sees. ``explain.error_samples``
  draws errors, and so predicts how many choices change, of experts and of next tokens (``explain.changed_choices``).
"""

from fragility_adjoint.predictor.estimator import Adjoint
from fragility_adjoint.predictor.prediction import Prediction, predict

__all__ = ["Adjoint", "Prediction", "predict"]
