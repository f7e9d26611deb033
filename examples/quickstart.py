"""Decode one prompt with HybridSpec on the trained pair that ships with the package.

The pair is tiny: its answers are often wrong, with and without HybridSpec. For a real pair, put the names of a target
and of its DFlash drafter into `target_id` and `drafter_id`.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hybridspec_hf

# for a model this small, handing work to a second CPU thread takes longer than doing it
torch.set_num_threads(1)

tiny_pair = Path(hybridspec_hf.__file__).parent / "assets" / "tiny_pair"
target_id, drafter_id = tiny_pair / "target", tiny_pair / "drafter"

tokenizer = AutoTokenizer.from_pretrained(target_id)
model = AutoModelForCausalLM.from_pretrained(target_id, dtype="auto", device_map="auto")
drafter = hybridspec_hf.DFlashDrafter.from_pretrained(drafter_id, dtype="auto", device_map="auto")

messages = [{"role": "user", "content": "Tom has 3 boxes with 12 pencils each. How many pencils does he have?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
inputs = inputs.to(model.device)

out = model.generate(
    **inputs,
    assistant_model=drafter,
    generation_mode="hybridspec",
    do_sample=False,
    max_new_tokens=128,
    return_dict_in_generate=True,
)

print(tokenizer.decode(out.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(
    f"{out.report.acceptance_length:.2f} tokens emitted and {out.report.mean_verify_length:.2f} verified per round, "
    f"{out.report.tokens_per_second:.0f} tokens/s"
)
