"""The engines that judge our recipes, each as it is run, with the plan that says how it computes."""

from dataclasses import dataclass

from fragility_engines.referees.worker import RUNNERS
from fragility_exports.plan import Plan

PACKAGES = tuple(package for _, package in RUNNERS.values())


@dataclass(frozen=True)
class Referee:
    """An ``engine`` of ``worker.RUNNERS`` that computes as ``kind``, and the ``plan`` by which we emulate it.

    ``untied`` engines quantize a head apart from the embedding with which a model shares its matrix. Engines that are
    ``linear_alone`` do not quantize GPT-2's ``Conv1D``.
    """

    engine: str
    kind: str
    plan: Plan
    untied: bool = False
    linear_alone: bool = False

    @property
    def name(self) -> str:
        """Engine and kind."""
        return f"{self.engine} {self.kind}"

    @property
    def package(self) -> str:
        """The package whose version is that of the engine."""
        return RUNNERS[self.engine][1]


REFEREES = (
    Referee("ctranslate2", "float32", Plan("fp32")),
    Referee("ctranslate2", "int8", Plan("ctranslate2-int8")),
    Referee("onnxruntime", "float32", Plan("fp32")),
    Referee("onnxruntime", "int8", Plan("onnxruntime-int8"), untied=True),
    Referee("onnxruntime", "int4", Plan("onnxruntime-int4"), untied=True, linear_alone=True),
    Referee("llama.cpp", "f32", Plan("kv-fp16@fp32")),
    Referee("llama.cpp", "f16", Plan("llama.cpp-f16+kv-fp16")),
    Referee("llama.cpp", "q8_0", Plan("gguf-q8_0+kv-fp16")),
    Referee("llama.cpp", "q6_k", Plan("gguf-q6_k+kv-fp16")),
    Referee("llama.cpp", "q4_k_m", Plan("gguf-q4_k_m+kv-fp16")),
    Referee("llama.cpp", "q4_k_m cache-q8_0", Plan("gguf-q4_k_m+kv-q8_0")),
    Referee("llama.cpp", "q4_0", Plan("gguf-q4_0+kv-fp16")),
    Referee("openvino", "float32", Plan("fp32")),
    Referee("openvino", "bf16", Plan("bf16", residual=True)),
    Referee("openvino", "int8-w", Plan("openvino-int8-w")),
    Referee("openvino", "int8", Plan("openvino-int8")),
    Referee("openvino", "int4-w", Plan("openvino-int4-w")),
    Referee("openvino", "int4", Plan("openvino-int4")),
    Referee("torch", "bf16", Plan("bf16")),
    Referee("torch", "int8", Plan("torch-int8"), untied=True, linear_alone=True),
    Referee("torchao", "int8", Plan("torchao-int8"), untied=True, linear_alone=True),
    Referee("torchao", "int8-w", Plan("torchao-int8-w"), untied=True, linear_alone=True),
)
