"""The text side of a model directory, without weights: config, a byte-level BPE tokenizer, a chat template.

Enough for a gateway, which never sees a tensor. Made in milliseconds, the same for the same arguments.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

UNK, BOS, EOS, IM_START, IM_END = SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = (
    "The baton passes from the first runner to the second without losing a step.",
    "What is the capital of France? The capital of France is Paris.",
    "Naïve café owners déjà vu: 漢字 and emoji 👩‍💻 are bytes like any other.",
)


def make_text_model(
    directory: Path, *, context_tokens: int = 512, adds_bos: bool = False, template: str | None = CHAT_TEMPLATE
) -> Path:
    """`adds_bos`: the tokenizer puts a BOS in front by default, as the template does by itself."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 2, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": context_tokens,
        "eos_token_id": SPECIAL_TOKENS.index(EOS),
    }
    of_tokenizer = {"bos_token": BOS, "eos_token": IM_END} | ({"chat_template": template} if template else {})
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(json.dumps(of_tokenizer))
    return directory
