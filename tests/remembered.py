"""What tests ask for hundreds of times and is the same each time: the tokens of the embedded texts."""

from functools import wraps

from transformers import BatchEncoding, TokenizersBackend

LONG = 100_000  # characters from which on a text takes a tenth of a second and more


def remember_tokens() -> None:
    """Let every process tokenize a long text once with each tokenizer, whatever object holds it."""
    encode, known = TokenizersBackend._encode_plus, dict[tuple, BatchEncoding]()

    @wraps(encode)
    def remembering(self, text, *args, **options):
        if not isinstance(text, str) or len(text) < LONG:
            return encode(self, text, *args, **options)
        asked = type(self), self.backend_tokenizer.to_str(), self.split_special_tokens, text, args, str(options)
        if asked not in known:
            known[asked] = encode(self, text, *args, **options)
        return BatchEncoding({name: list(values) for name, values in known[asked].items()})

    TokenizersBackend._encode_plus = remembering
