"""Everything that knows what tokens spell: tokenizer, chat template, detokenizer, stop strings."""
