"""HybridSpec decoding for transformers: `model.generate(..., generation_mode="hybridspec")`.

Importing this package registers one decoding mode with transformers and changes nothing else; `unregister()` takes it
away again, and `release(model)` frees what a model's engine holds.
"""

from .versions import check_transformers

check_transformers()

from hybridspec_generation import (  # noqa: E402
    AcceptanceTable,
    CalibratedFor,
    CostTable,
    DecodeReport,
    ExpertTable,
    HybridSpecConfig,
)

from .calibration.calibrate import calibrate  # noqa: E402
from .drafters.dflash import DFlashConfig, DFlashDrafter  # noqa: E402
from .engine import release  # noqa: E402
from .registration import register, unregister  # noqa: E402
from .strategy import HybridSpecOutput  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "AcceptanceTable",
    "CalibratedFor",
    "CostTable",
    "DFlashConfig",
    "DFlashDrafter",
    "DecodeReport",
    "ExpertTable",
    "HybridSpecConfig",
    "HybridSpecOutput",
    "calibrate",
    "register",
    "release",
    "unregister",
]

register()
