"""The real studies with more epochs, so that there are learning curves to look at.

Learning rates follow no schedule: the first epochs of such a trial are the whole of a trial of a
shorter study.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, Subset

from studies.char_gpt import EVAL_WINDOWS, TRAIN_WINDOWS, CharGPT
from studies.digits_cnn import DigitsCNN
from tuner import Loaders

TRAIN_SHARE, EVAL_SHARE = 3, 2  # one window in so many


class LongerDigitsCNN(DigitsCNN):
    """`digits_cnn` for 9 epochs in place of 3."""

    epochs = 9


class LongerCharGPT(CharGPT):
    """`char_gpt` for 4 epochs of a third of its text, in place of 2 of the whole: hours become minutes.

    The largest batch is as large as before (128 windows), and so is every peak.
    """

    epochs = 4

    def loaders(self, params: dict[str, Any]) -> Loaders:
        """Return loaders of every third window to train on, and of every second to evaluate on."""
        whole = super().loaders(params)
        train = Subset(whole.train.dataset, range(0, TRAIN_WINDOWS, TRAIN_SHARE))
        held_out = Subset(whole.eval.dataset, range(0, EVAL_WINDOWS, EVAL_SHARE))
        return Loaders(
            train=DataLoader(train, batch_size=params["batch_size"], shuffle=True),
            eval=DataLoader(held_out, batch_size=params["batch_size"]),
        )
