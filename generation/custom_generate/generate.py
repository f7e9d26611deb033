"""`model.generate(..., custom_generate=<this repository>)` → the decoding mode that hybridspec_hf registers."""

from typing import Any

# importing registers the mode "hybridspec" with transformers
import hybridspec_hf  # noqa: F401


def generate(model: Any, **kwargs: Any) -> Any:
    """Run HybridSpec with the arguments that `model.generate` was called with.

    Args:
        model: the target model.
        kwargs: every argument of `model.generate`, named. Pass a drafter as `assistant_model`; without one the call
            decodes autoregressively.

    Returns:
        What `model.generate` returns.
    """
    kwargs["generation_mode"] = "hybridspec"
    return model.generate(**kwargs)
