"""Reading one object of a config.json so that no key is overlooked.

Every key is taken by name, checked, or known to be without effect; `finish` refuses the rest.
"""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

S = TypeVar("S", bound=str)

# Keys that transformers' PretrainedConfig writes into any config.json. None changes what the
# model computes; the sampling settings among them yield to generation_config.json.
_PRETRAINED = """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _experts_implementation _name_or_path add_cross_attention architectures attn_implementation
    auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping encoder_no_repeat_ngram_size eos_token_id experts_implementation
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing id2label is_decoder is_encoder_decoder label2id length_penalty max_length
    min_length model_type name_or_path no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_router_logits output_scores
    prefix pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty
    return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype
    torchscript transformers_version typical_p use_bfloat16 use_cache
"""
PRETRAINED_CONFIG_KEYS = frozenset(_PRETRAINED.split())


class Section:
    """A JSON object whose keys are taken one by one."""

    def __init__(self, values: object, where: str) -> None:
        """`where` names the object in messages, for example `text_config`."""
        self.where = where
        if not isinstance(values, Mapping):
            raise ValueError(f"{where}={values!r}: must be a JSON object")
        self.values: Mapping[str, Any] = values
        self.taken: set[str] = set()

    def error(self, key: str, rule: str) -> ValueError:
        """The error for a key's value, naming both."""
        return ValueError(f"{self.where}.{key}={self.values.get(key)!r}: {rule}")

    def value(self, key: str) -> Any:
        """The value, or None when the key is absent or null."""
        self.taken.add(key)
        return self.values.get(key)

    def size(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A whole number; required unless a default is given."""
        number = self.optional_size(key, minimum=minimum)
        if number is None:
            number = default
        if number is None:
            raise ValueError(f"{self.where}.{key} is missing")
        return number

    def optional_size(self, key: str, *, minimum: int = 1) -> int | None:
        """A whole number, or None when absent."""
        number = self.value(key)
        if number is None:
            return None
        if isinstance(number, bool) or not isinstance(number, int) or number < minimum:
            raise self.error(key, f"must be a whole number of at least {minimum}")
        return number

    def optional_number(self, key: str) -> float | None:
        """A real number, or None when absent."""
        number = self.value(key)
        if number is None:
            return None
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise self.error(key, "must be a number")
        return float(number)

    def number(self, key: str, default: float) -> float:
        """A real number."""
        number = self.optional_number(key)
        return default if number is None else number

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        flag = self.value(key)
        if flag is None:
            return default
        if not isinstance(flag, bool):
            raise self.error(key, "must be true or false")
        return flag

    def expect(self, key: str, *allowed: object, why: str, required: bool = False) -> None:
        """Refuses a setting that cannot be honoured; absent is fine unless required."""
        value = self.value(key)
        if value is None and not required:
            return
        if not any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed
        ):
            choice = " or ".join(repr(one) for one in allowed)
            raise self.error(key, f"only {choice} is supported ({why})")

    def choice(self, key: str, default: S, *others: S) -> S:
        """One of a few strings; the default when absent."""
        value = self.value(key)
        if value is None:
            return default
        for one in (default, *others):
            if value == one:
                return one
        names = " or ".join(repr(one) for one in (default, *others))
        raise self.error(key, f"only {names} is supported")

    def section(self, key: str) -> "Section | None":
        """An object inside this one, or None when absent."""
        values = self.value(key)
        return None if values is None else Section(values, f"{self.where}.{key}")

    def ignore(self, keys: Collection[str]) -> None:
        """Declares keys that have no effect on what the model computes."""
        self.taken.update(keys)

    def finish(self) -> None:
        """Raises `ValueError` naming every key nobody took, with the nearest known one."""
        unknown = sorted(set(self.values) - self.taken)
        if not unknown:
            return
        hints = []
        for key in unknown:
            near = get_close_matches(key, sorted(self.taken), n=1, cutoff=0.6)
            hints.append(f"{key!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
        raise ValueError(f"{self.where}: unknown key {', '.join(hints)}")
