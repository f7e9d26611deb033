"""The language-model head: hidden states -> tokens, without the logits in memory."""
