"""A random pair and its prompts on disk, in the layout of the shipped one."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from .tiny_models import MASK_ID, VOCAB, tiny_drafter, tiny_target

EOS_ID = MASK_ID - 1


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, then EOS and the mask: exactly the tiny models' vocabulary."""
    characters = {chr(code): code - 32 for code in range(32, 127)}
    vocab = {**characters, "<eos>": EOS_ID, "<mask>": MASK_ID}
    assert len(vocab) == VOCAB
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=template)


def save_pair(folder: Path, prompts: Sequence[dict[str, str]]) -> Path:
    """Write target, tokenizer, drafter and `prompts.jsonl` into `folder`."""
    target = tiny_target(eos_token_id=EOS_ID)
    target.save_pretrained(folder / "target")
    character_tokenizer().save_pretrained(folder / "target")
    tiny_drafter(target, num_target_layers=4).save_pretrained(folder / "drafter")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder
