"""A calibration folder -> the rounds captured in it, checked against the tables that they are judged by."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hybridspec_generation import CalibratedFor, ExpertTable

from ..calibration.capture import CaptureRounds
from ..calibration.store import CAPTURE_NAME, CaptureStore


class Capture(NamedTuple):
    """What `hybridspec calibrate` captured.

    Attributes:
        rounds: of each prompt.
        drafter, drafter_weights: name and fingerprint of the drafter. "": not known.
        context: tokens before a typical round; 0: not known.
    """

    rounds: list[CaptureRounds]
    drafter: str = ""
    drafter_weights: str = ""
    context: int = 0

    def check_drafter(self, made_for: CalibratedFor | None) -> None:
        """Refuse tables of another drafter, where both sides name theirs.

        A target's fingerprint cannot be compared: a capture's and a config's are made from different modules.

        Raises:
            ValueError: naming both drafters.
        """
        if made_for is None or not self.drafter_weights or not made_for.drafter_weights:
            return
        if self.drafter_weights != made_for.drafter_weights:
            raise ValueError(
                f"The rounds are of drafter {self.drafter or 'unknown'} ({self.drafter_weights}), the config was "
                f"calibrated for {made_for.drafter} ({made_for.drafter_weights}). Calibrate again."
            )


def load_capture(folder: str | Path) -> Capture:
    """Read the rounds that `hybridspec calibrate` captured in a folder.

    Raises:
        FileNotFoundError: if the folder has no capture. ValueError: if it is damaged.
    """
    path = Path(folder) / CAPTURE_NAME
    if not path.is_file():
        raise FileNotFoundError(f"No {CAPTURE_NAME} in {folder}. `hybridspec calibrate --output {folder}` writes one.")
    try:
        header: dict[str, Any] = json.loads(path.read_bytes().partition(b"\n")[0])
        rounds = list(CaptureStore(path, header).captured.values())
        context = int(header.get("context", 0))
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}). Delete it and calibrate again.") from error
    return Capture(rounds, header.get("drafter", ""), header["drafter_weights"], context)


def check_sizes(captured: Sequence[CaptureRounds], blocks: dict[str, int], experts: ExpertTable) -> None:
    """Refuse rounds of another block or target than the tables'.

    Args:
        captured: the rounds of each prompt. blocks: W of each table, by its name.

    Raises:
        ValueError: if there are no rounds, or they and a table differ.
    """
    filled = [part for part in captured if len(part.accepted)]
    if not filled:
        raise ValueError("There are no rounds to analyse: every one was cut. Capture with more new tokens.")
    for block in (part.new_layer0.shape[1] for part in filled):
        for name, size in blocks.items():
            if size != block:
                raise ValueError(
                    f"The rounds are of blocks of {block} tokens (anchor included), the {name} table of the config is "
                    f"for {size}. Use the config of their own calibration."
                )
    # the first token finds no expert known: it adds all of its own
    later = experts.top_k and experts.top_k * (experts.num_moe_layers - 1)
    for part in filled:
        found = {*zip(part.new_layer0[:, 0].tolist(), part.new_later[:, 0].tolist(), strict=True)}
        if found != {(experts.top_k, later)}:
            layer0, others = max(found)
            raise ValueError(
                f"The first token of a round chose {layer0} experts in Layer 0 and {others} in later layers; the "
                f"experts table is of a target with top_k={experts.top_k} and {experts.num_moe_layers} MoE layers, "
                f"which makes {experts.top_k} and {later}. Use the config of their own calibration."
            )
