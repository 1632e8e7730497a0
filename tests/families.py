"""Small configurations of every family of decoders that Hugging Face ships, and tokens for them."""

from tiny import random_tokens
from transformers import (
    BloomConfig,
    CodeGenConfig,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    XGLMConfig,
)

TOKENS = random_tokens(4, 64, vocabulary=257, smallest=1)
SPECIAL = {"vocab_size": 257, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SHAPE = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 128}
MLP = SPECIAL | SHAPE | {"intermediate_size": 160}
GROUPED = MLP | {"num_key_value_heads": 2}
ROUTED = GROUPED | {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
DENSE = [
    GPT2Config(n_layer=3, n_embd=64, n_head=4, n_positions=128, **SPECIAL),
    GPTNeoXConfig(**MLP),
    OPTConfig(ffn_dim=160, word_embed_proj_dim=64, **SPECIAL, **SHAPE),
    LlamaConfig(**GROUPED),
    MistralConfig(sliding_window=24, **GROUPED),
    Qwen2Config(**GROUPED),
    Qwen3Config(head_dim=16, **GROUPED),
    GemmaConfig(head_dim=16, **GROUPED),
    Gemma2Config(head_dim=16, sliding_window=24, **GROUPED),
    Gemma3TextConfig(head_dim=16, sliding_window=24, **GROUPED),
    PhiConfig(**MLP),
    Phi3Config(**GROUPED),
]
OTHERS = [
    BloomConfig(n_layer=3, hidden_size=64, n_head=4, **SPECIAL),
    CohereConfig(**GROUPED),
    FalconConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, **SPECIAL),
    GPTJConfig(n_layer=3, n_embd=64, n_head=4, n_positions=128, rotary_dim=8, **SPECIAL),
    Olmo2Config(**GROUPED),
]
EXPERTS = [
    MixtralConfig(num_local_experts=4, **GROUPED),
    Qwen2MoeConfig(shared_expert_intermediate_size=96, **ROUTED),
    Qwen3MoeConfig(head_dim=16, **ROUTED),
]  # fmt: skip
OLDER = {  # attention lacks ``is_causal``, or calls its number otherwise; positions or masks end with the context
    "bloom": BloomConfig(n_layer=2, hidden_size=32, n_head=4, vocab_size=101),
    "mpt": MptConfig(d_model=32, n_layers=2, n_heads=4, max_seq_len=100, vocab_size=101),
    "codegen": CodeGenConfig(n_embd=32, n_layer=2, n_head=4, n_positions=100, rotary_dim=4, vocab_size=101),
    "xglm": XGLMConfig(d_model=32, ffn_dim=48, num_layers=2, attention_heads=4, vocab_size=101),
    "gpt_neo": GPTNeoConfig(
        hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], vocab_size=101,
        max_position_embeddings=100, intermediate_size=48,
    ),
}  # fmt: skip
