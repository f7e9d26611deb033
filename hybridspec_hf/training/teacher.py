"""Prompts → answers sampled from a small Llama-type chat model, many at a time (used once, to write the corpus)."""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hybridspec_hf.training import slots
from hybridspec_hf.training.corpus import varied

KINDS = {"writing": slots.STORY_FORMS, "roleplay": slots.CHAT_FORMS, "qa": slots.QA_FORMS, "howto": slots.HOWTO_FORMS}
SYSTEM = "You are a friendly helper. You answer in four or five short sentences, with simple words that a child knows."
WEIGHTS = {"writing": 0.32, "roleplay": 0.26, "qa": 0.28, "howto": 0.14}
SUMMARY_FORMS = (
    "Summarize this text in one or two sentences:\n\n{}",
    "{}\n\nSummarize the text above in a few words.",
    "Read this text and tell me what it is about.\n\n{}",
)


def sample_prompt(rng: random.Random, split: str) -> dict[str, str]:
    """One prompt of a random kind: {"category", "split", "prompt"}; how-to questions count as qa."""
    kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    prompt = slots.fill(rng, rng.choice(KINDS[kind]), split)
    return {"category": "qa" if kind == "howto" else kind, "split": split, "prompt": prompt}


def summary_prompts(rng: random.Random, rows: list[dict[str, str]], count: int) -> list[dict[str, str]]:
    """Summarization prompts over earlier answers of 40 to 130 words; they keep the split of their source."""
    fit = [row for row in rows if 40 <= len(row["answer"].split()) <= 130 and row["category"] in ("writing", "qa")]
    return [
        {
            "category": "summarization",
            "split": row["split"],
            "prompt": rng.choice(SUMMARY_FORMS).format(row["answer"]),
        }
        for row in rng.sample(fit, min(count, len(fit)))
    ]


def load_teacher(folder: str | Path, device: str) -> tuple[Any, Any]:
    """(model, tokenizer) from a folder that holds one .gguf file or a plain transformers checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = sorted(Path(folder).glob("*.gguf"))
    extra: dict[str, Any] = {"gguf_file": gguf[0].name} if gguf else {}
    tokenizer = AutoTokenizer.from_pretrained(folder, **extra)
    if gguf:
        extra["quantization_config"] = GgufConfig(dequantize=True)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **extra)
    return model.to(device).eval(), tokenizer


class LlamaDecoder:
    """Batched sampling with a static K/V cache over the modules of a LlamaForCausalLM (no padding waste in attention).

    Prompts are left-padded to `[B, T]`; keys and values live in one buffer `[L, 2, B, HKV, S, D]`.
    """

    def __init__(self, model: Any, temperature: float = 0.7, top_p: float = 0.9, top_k: int = 40) -> None:
        self.model, self.temperature, self.top_p, self.top_k = model, temperature, top_p, top_k
        config = model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        base = config.rope_parameters["rope_theta"]
        self.frequency = base ** (-torch.arange(0, self.head_dim, 2, device=model.device).float() / self.head_dim)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE on `x [B, H, T, D]` at `positions [B, T]`."""
        angle = positions[:, None, :, None].float() * self.frequency
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def attend(self, attn: Any, x: Tensor, positions: Tensor, cache: Tensor, start: int, mask: Tensor) -> Tensor:
        """Attention of `x [B, T, E]` over cache `[2, B, HKV, S, D]`, filled from `start`; mask `[B, 1, T, S]`."""
        batch, length, _ = x.shape
        end = start + length
        q, k, v = (
            proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for proj in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        cache[0, :, :, start:end] = self.rotate(k, positions)
        cache[1, :, :, start:end] = v
        # queries of one group become query rows of their key head, so keys are never repeated
        group = self.heads // self.kv_heads
        q = self.rotate(q, positions).reshape(batch, self.kv_heads, group * length, self.head_dim)
        mask = mask.repeat(1, 1, group, 1)
        out = F.scaled_dot_product_attention(q, cache[0, :, :, :end], cache[1, :, :, :end], attn_mask=mask)
        out = out.reshape(batch, self.heads, length, self.head_dim).transpose(1, 2).reshape(batch, length, -1)
        return attn.o_proj(out)

    def forward(self, ids: Tensor, positions: Tensor, cache: Tensor, start: int, mask: Tensor) -> Tensor:
        """Logits of the last position `[B, V]` for new tokens `ids [B, T]`."""
        body = self.model.model
        x = body.embed_tokens(ids)
        for layer, rows in zip(body.layers, cache, strict=True):
            x = x + self.attend(layer.self_attn, layer.input_layernorm(x), positions, rows, start, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.lm_head(body.norm(x[:, -1]))

    def sample(self, logits: Tensor) -> Tensor:
        """One token per row `[B]`: top-k, then nucleus, at the decoder's temperature (0 = greedy)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        values, index = (logits.float() / self.temperature).topk(self.top_k, dim=-1)
        probs = values.softmax(-1)
        probs = probs.masked_fill(probs.cumsum(-1) - probs > self.top_p, 0)
        return index.gather(1, torch.multinomial(probs, 1)).squeeze(1)

    @torch.no_grad()
    def generate(self, ids: Tensor, real: Tensor, max_new_tokens: int, eos: int, stop_share: float = 0.93) -> Tensor:
        """New tokens `[B, N]` after left-padded `ids [B, T]` (`real [B, T]` is True on tokens); stops early once a
        share of the rows has ended. A row's tokens after its `eos` are meaningless."""
        batch, length = ids.shape
        size = length + max_new_tokens
        config, weight = self.model.config, self.model.lm_head.weight
        shape = (config.num_hidden_layers, 2, batch, self.kv_heads, size, self.head_dim)
        cache = torch.empty(shape, device=ids.device, dtype=weight.dtype)
        visible = torch.cat([real, real.new_ones(batch, max_new_tokens)], dim=1)
        positions = (real.long().cumsum(1) - 1).clamp_min(0)
        causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        # a padding row sees itself, so that no softmax row is empty
        mask = (causal & real[:, None, :]) | torch.eye(length, dtype=torch.bool, device=ids.device)
        logits = self.forward(ids, positions, cache, 0, mask[:, None])
        position, done = positions[:, -1:] + 1, torch.zeros(batch, dtype=torch.bool, device=ids.device)
        tokens = []
        for i in range(max_new_tokens):
            token = self.sample(logits)
            tokens.append(token)
            done |= token == eos
            if i % 16 == 15 and done.float().mean() >= stop_share:
                break
            end = length + i + 1
            logits = self.forward(token[:, None], position, cache, end - 1, visible[:, None, None, :end])
            position = position + 1
        return torch.stack(tokens, dim=1)


def tidy(text: str, ended: bool) -> str | None:
    """The part of a sampled answer worth learning, or None: whole sentences, no loop, plain characters."""
    text = text.strip().replace("\u2019", "'").replace("\u201c", '"').replace("\u201d", '"').replace("\u2014", "-")
    if not ended:
        cut = text.rfind("\n\n")
        if cut < 250:
            cut = max(text.rfind(mark) for mark in (". ", "! ", "? ", ".\n")) + 1
        text = text[:cut].strip()
    return text if 80 <= len(text) <= 900 and varied(text) and text.isascii() else None


def answer(decoder: LlamaDecoder, tokenizer: Any, rows: list[dict[str, str]], max_new: int) -> list[dict[str, str]]:
    """The rows whose sampled answer survives `tidy`, with that answer added."""
    ids = [
        tokenizer.apply_chat_template(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["prompt"]}],
            add_generation_prompt=True,
        )["input_ids"]
        for row in rows
    ]
    longest = max(map(len, ids))
    device = decoder.model.device
    padded = torch.tensor([[0] * (longest - len(x)) + x for x in ids], device=device)
    real = torch.tensor([[False] * (longest - len(x)) + [True] * len(x) for x in ids], device=device)
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    out = decoder.generate(padded, real, max_new, eos).cpu().tolist()
    texts = tokenizer.batch_decode([x[: x.index(eos)] if eos in x else x for x in out], skip_special_tokens=True)
    tidied = [tidy(text, eos in x) for text, x in zip(texts, out, strict=True)]
    return [row | {"answer": text} for row, text in zip(rows, tidied, strict=True) if text]


def write_answers(
    folder: str | Path, device: str, minutes: float, batch: int, seed: int, max_new: int = 192
) -> Iterator[list[dict[str, str]]]:
    """Batches of answered rows until the time is used up; every fourth batch summarizes answers of earlier ones."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model, tokenizer = load_teacher(folder, device)
    decoder = LlamaDecoder(model)
    history: list[dict[str, str]] = []
    start, count = time.monotonic(), 0
    while time.monotonic() - start < 60 * minutes:
        decoder.temperature = rng.choice([0.5, 0.6, 0.7])
        prompts = [sample_prompt(rng, "test" if rng.random() < 0.04 else "train") for _ in range(batch)]
        # sources stay short-lived: a passage is summarized at most once
        if count % 4 == 3:
            prompts, history = summary_prompts(rng, history, batch // 2), []
        count += 1
        if prompts:
            done = answer(decoder, tokenizer, prompts, max_new)
            history += done
            yield done
